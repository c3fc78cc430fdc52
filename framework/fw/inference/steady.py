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
"""Recordings, each of another number of sequences; one takes about what activations of such a step do."""

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Ids and positions ``[1, T]``, and rows of them whose logits are wanted; logits ``[wanted, V]``."""


class Token(Protocol):
    """Of a sequence, in a step."""

    @property
    def stretch(self) -> Stretch: ...
    @property
    def tokens(self) -> Sequence[int]: ...


@dataclass
class _Step:
    ids_1T: Tensor
    positions_1T: Tensor
    wanted_T: Tensor
    places: Places
    tape: Tape
    logits_TV: Tensor
    proven: bool = False


class SteadySteps:
    """Steps of one token of each sequence, on the CPU.

    A number of sequences is recorded when it comes twice in a row. What is made again for the first time is compared with what Python
    computes; a model that differs is left to Python.

    Args:
        compute: runs the model, through ``cache``.
        idle_hooks: how many forward hooks the model has that do nothing in such steps.
    """

    def __init__(self, compute: Compute, cache: KVCache, model: CausalLM, idle_hooks: Callable[[], int]) -> None:
        self._compute, self._cache, self._model, self._idle_hooks = compute, cache, model, idle_hooks
        self._known: OrderedDict[int, _Step] = OrderedDict()
        self._before = 0
        self._hooks = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self.refused: str | None = None
        """Why steps of this model cannot be recorded, if so."""
        self.repeated = 0
        """Steps that were made without Python."""

    def other(self) -> None:
        """A step comes that is none of these."""
        self._before = 0

    def run(self, tokens: Sequence[Token]) -> Tensor | None:
        """Logits ``[T, V]``, which are there until the next step; None, and nothing is done, where it is left to Python."""
        count, before, self._before = len(tokens), self._before, len(tokens)
        if self.refused is not None or sum(map(len, self._hooks)) > self._idle_hooks() or _get_current_dispatch_mode_stack():
            return None
        if (step := self._known.get(count)) is not None:
            self._known.move_to_end(count)
            return self._again(step, tokens)
        return self._recorded(tokens) if count == before else None

    def _again(self, step: _Step, tokens: Sequence[Token]) -> Tensor:
        self._fill(step.ids_1T, step.positions_1T, step.places, tokens)
        step.tape.play()
        if step.proven:
            self.repeated += 1
            return step.logits_TV
        found_TV = self._compute(step.ids_1T, step.positions_1T, step.wanted_T)
        step.proven = torch.equal(found_TV.view(torch.int32), step.logits_TV.view(torch.int32))
        if not step.proven:
            self.refused = f"{type(self._model).__name__} computes otherwise each time"
            self._known.clear()
            warnings.warn(f"{self.refused}, in Python; its steps are not recorded, which is slower", stacklevel=2)
        return found_TV

    def _recorded(self, tokens: Sequence[Token]) -> Tensor | None:
        count = len(tokens)
        if (places := self._cache.places(count)) is None:
            self.refused = f"{type(self._cache).__name__} has no places that stay"
            return None
        inputs = (torch.empty((1, count), dtype=torch.int64), torch.empty((1, count), dtype=torch.int64), torch.arange(count))
        recorder = Recorder(inputs, [*places.tensors, *self._model.parameters(), *self._model.buffers()])
        self._fill(*inputs[:2], places, tokens)
        with recorder.recording():
            logits_TV = self._compute(*inputs)
        try:
            self._known[count] = _Step(*inputs, places, recorder.tape(logits_TV), logits_TV)
        except NotRepeatable as why:
            self.refused = str(why)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return logits_TV

    def _fill(self, ids_1T: Tensor, positions_1T: Tensor, places: Places, tokens: Sequence[Token]) -> None:
        ids_1T.numpy()[0] = [token.tokens[0] for token in tokens]
        positions_1T.numpy()[0] = [token.stretch.start for token in tokens]
        self._cache.begin([token.stretch for token in tokens], places)
