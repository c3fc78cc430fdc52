"""Steps that differ in nothing but their numbers: recorded once, and made again without Python."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fw.kernels.tape import NotRepeatable, Recorder, Tape
from fw.kinds.kv_cache import KVCache, Places, Stretch
from fw.kinds.model import CausalLM

_MOST = 32
"""Recordings, each of steps of another form; one takes about what activations of such a step do."""
_TOKENS = 64
"""Most of a step that is recorded: with more, products take the time, and not Python."""
_Form = tuple[tuple[int, int], ...]
"""Of each sequence the number of tokens, and how many of them, the last ones, are wanted."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Ids and positions ``[1, T]``, and rows of them whose logits are wanted; logits ``[wanted, V]``."""


class Piece(Protocol):
    """Tokens of a sequence, in a step."""

    @property
    def stretch(self) -> Stretch: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def wanted(self) -> range: ...


@dataclass
class _Step:
    ids_1T: Tensor
    positions_1T: Tensor
    wanted_R: Tensor
    places: Places
    tape: Tape
    logits_RV: Tensor
    proven: bool = False


class SteadySteps:
    """Steps of a few tokens, on the CPU: of one of each sequence, and of those that are guessed.

    A form is recorded when it comes twice in a row. What is made again for the first time is compared with what Python computes; a model
    that differs is left to Python.

    Args:
        compute: runs the model, through ``cache``.
        idle_hooks: how many forward hooks the model has that do nothing in such steps.
    """

    def __init__(self, compute: Compute, cache: KVCache, model: CausalLM, idle_hooks: Callable[[], int]) -> None:
        self._compute, self._cache, self._model, self._idle_hooks = compute, cache, model, idle_hooks
        self._known: OrderedDict[_Form, _Step] = OrderedDict()
        self._before: _Form = ()
        self._hooks = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self.refused: str | None = None
        """Why steps of this model cannot be recorded, if so."""
        self.repeated = 0
        """Steps that were made without Python."""

    def run(self, pieces: Sequence[Piece]) -> Tensor | None:
        """Logits ``[wanted, V]``, which are there until the next step; None, and nothing is done, where it is left to Python."""
        form = tuple((piece.stretch.length, len(piece.wanted)) for piece in pieces)
        before, self._before = self._before, form
        if any(not wanted for _, wanted in form) or sum(length for length, _ in form) > _TOKENS:
            return None
        if self.refused is not None or sum(map(len, self._hooks)) > self._idle_hooks() or _get_current_dispatch_mode_stack():
            return None
        if (step := self._known.get(form)) is not None:
            self._known.move_to_end(form)
            return self._again(step, pieces)
        return self._recorded(form, pieces) if form == before else None

    def _again(self, step: _Step, pieces: Sequence[Piece]) -> Tensor:
        self._fill(step.ids_1T, step.positions_1T, step.places, pieces)
        step.tape.play()
        if step.proven:
            self.repeated += 1
            return step.logits_RV
        found_RV = self._compute(step.ids_1T, step.positions_1T, step.wanted_R)
        step.proven = torch.equal(found_RV.view(torch.int32), step.logits_RV.view(torch.int32))
        if not step.proven:
            self.refused = f"{type(self._model).__name__} computes otherwise each time"
            self._known.clear()
            warnings.warn(f"{self.refused}, in Python; its steps are not recorded, which is slower", stacklevel=2)
        return found_RV

    def _recorded(self, form: _Form, pieces: Sequence[Piece]) -> Tensor | None:
        if (places := self._cache.places([length for length, _ in form])) is None:
            self.refused = f"{type(self._cache).__name__} has no places that stay"
            return None
        rows: list[int] = []
        count = 0
        for length, wanted in form:
            count += length
            rows += range(count - wanted, count)
        inputs = (torch.empty((1, count), dtype=torch.int64), torch.empty((1, count), dtype=torch.int64), torch.tensor(rows))
        recorder = Recorder(inputs, [*places.tensors, *self._model.parameters(), *self._model.buffers()])
        self._fill(*inputs[:2], places, pieces)
        with recorder.recording():
            logits_RV = self._compute(*inputs)
        try:
            self._known[form] = _Step(*inputs, places, recorder.tape(logits_RV), logits_RV)
        except NotRepeatable as why:
            self.refused = str(why)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return logits_RV

    def _fill(self, ids_1T: Tensor, positions_1T: Tensor, places: Places, pieces: Sequence[Piece]) -> None:
        ids_1T.numpy()[0] = [token for piece in pieces for token in piece.tokens]
        positions_1T.numpy()[0] = [at for piece in pieces for at in range(piece.stretch.start, piece.stretch.end)]
        self._cache.begin([piece.stretch for piece in pieces], places)
