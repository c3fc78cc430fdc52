"""Steps that differ in nothing but their numbers: recorded once, and made again without Python."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fw.kernels.graph import Graph
from fw.kernels.tape import NotRepeatable, Recorder
from fw.kinds.kv_cache import KVCache, Places, Stretch
from fw.kinds.model import CausalLM
from fw.planned import is_gpu, on_gpu, planned_gpu

_MOST = 32
"""Recordings, each of steps of another form, besides those of one token each on a GPU; one takes about what activations of such a step
do."""
_TOKENS, _TOKENS_ON_GPU = 64, 512
"""Most of a step that is recorded: with more, products take the time, and not Python."""
_SIZES_ON_GPU = (1, 2, 4)
"""Sequences of steps that are recorded on a GPU; then multiples of 8."""
_Form = tuple[tuple[int, int], ...]
"""Of each sequence the number of tokens, and how many of them, the last ones, are wanted."""

Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Ids and positions ``[1, T]``, and rows of them whose logits are wanted, None where all are; logits ``[wanted, V]``."""


class Way(Enum):
    """How a step is made. Ranks that divide a model all go the first one's way: each way has another number of sums between them."""

    PYTHON = "python"
    RECORDED = "recorded"
    """By Python, and recorded."""
    COMPARED = "compared"
    """By its recording, and by Python besides, which it is compared with."""
    REPEATED = "repeated"
    """By its recording."""


class Piece(Protocol):
    """Tokens of a sequence, in a step."""

    @property
    def stretch(self) -> Stretch: ...
    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def wanted(self) -> range: ...
    @property
    def scored(self) -> range: ...


def sizes_on_gpu(most: int) -> list[int]:
    """Numbers of sequences that steps are recorded of, where there are so many at most."""
    return sorted({_filled_up(sequences) for sequences in range(1, most + 1)})


def _filled_up(sequences: int) -> int:
    return next((size for size in _SIZES_ON_GPU if size >= sequences), -(-sequences // 8) * 8)


def _alike(found_RV: Tensor, again_RV: Tensor) -> bool:
    """To the last bit on the CPU; on a GPU products may be divided otherwise in a graph."""
    if not on_gpu(found_RV):
        return torch.equal(found_RV.view(torch.int32), again_RV.view(torch.int32))
    return bool((found_RV - again_RV).abs().max() <= 0.02 * found_RV.abs().max())


class _Inputs:
    """Ids and positions of a step's tokens, and the rows whose logits are wanted.

    A GPU may not have read what it was last told when it is told of the next step: there are two of what the host writes, which is waited
    for where nobody has waited for the step of the one before.
    """

    def __init__(self, rows: Sequence[int], tokens: int, device: torch.device) -> None:
        self._there = torch.zeros((2, tokens), dtype=torch.int64, device=device)
        two = [torch.zeros((2, tokens), dtype=torch.int64, pin_memory=True) for _ in range(2)] if is_gpu(device) else []
        self._hosts = [(host, torch.cuda.Event() if host.is_pinned() else None) for host in two or [self._there]]
        self.ids_1T, self.positions_1T = self._there[:1], self._there[1:]
        self.wanted_R = None if len(rows) == tokens else torch.tensor(rows, device=device)

    def fill(self, pieces: Sequence[Piece], tokens_T: Tensor | None) -> None:
        self._hosts.reverse()
        host, read = self._hosts[0]
        if read is not None:
            read.synchronize()
        ids, positions = host.numpy()
        at = [at for piece in pieces for at in range(piece.stretch.start, piece.stretch.end)]
        positions[: len(at)] = at
        if tokens_T is None:
            ids[: len(at)] = [token for piece in pieces for token in piece.tokens]
        if host is not self._there:
            self._there.copy_(host, non_blocking=True)
            if read is not None:
                read.record()
        if tokens_T is not None:
            self.ids_1T[0, : len(at)].copy_(tokens_T)

    @property
    def all(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.ids_1T, self.positions_1T, self.wanted_R

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self.all if x is not None]


class _Recording(Protocol):
    def play(self) -> None: ...


@dataclass
class _Step:
    inputs: _Inputs
    places: Places
    recording: _Recording
    logits_RV: Tensor
    proven: bool = False


class SteadySteps:
    """Steps of a few tokens: of one of each sequence, and of those that are guessed.

    A form is recorded when it comes twice in a row. What is made again for the first time is compared with what Python computes; a model
    that differs is left to Python. On a GPU steps of one token each are made of as many sequences as there are recordings for, where
    some may be nobody's.

    Args:
        compute: runs the model, through ``cache``.
        idle_hooks: how many forward hooks the model has that do nothing in such steps.
    """

    def __init__(self, compute: Compute, cache: KVCache, model: CausalLM, device: torch.device, idle_hooks: Callable[[], int]) -> None:
        self._compute, self._cache, self._model, self._device, self._idle_hooks = compute, cache, model, device, idle_hooks
        self._on_gpu = is_gpu(device)
        self._pool = torch.cuda.graph_pool_handle() if self._on_gpu and planned_gpu() is None else None
        self._known: OrderedDict[_Form, _Step] = OrderedDict()
        self._before: _Form = ()
        self._hooks = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self.refused: str | None = None
        """Why steps of this model cannot be recorded, if so."""
        self.repeated = 0
        """Steps that were made without Python."""

    def way(self, pieces: Sequence[Piece]) -> Way:
        """How a step of these is made; to be asked once of each step, in order."""
        form = self._form(pieces)
        before, self._before = self._before, form
        if not form or self.refused is not None or sum(map(len, self._hooks)) > self._idle_hooks() or self._watched():
            return Way.PYTHON
        if (step := self._known.get(form)) is not None:
            return Way.REPEATED if step.proven else Way.COMPARED
        return Way.RECORDED if form == before else Way.PYTHON

    def run(self, way: Way, pieces: Sequence[Piece], tokens_T: Tensor | None = None) -> Tensor | None:
        """Logits ``[wanted, V]``, which are there until the next step; None, and nothing is done, where it is left to Python, and where
        this rank has no recording although the first one has.

        Args:
            tokens_T: of all pieces, where they are on the device alone.
        """
        if way is Way.PYTHON:
            return None
        form, wanted = self._form(pieces), sum(len(piece.wanted) for piece in pieces)
        if way is Way.RECORDED:
            found_RV = self._recorded(form, pieces, tokens_T) if self.refused is None else None
            return None if found_RV is None else found_RV[:wanted]
        if (step := self._known.get(form)) is None:
            return None
        self._known.move_to_end(form)
        return self._again(step, way, pieces, tokens_T, wanted)

    def record(self, pieces: Sequence[Piece]) -> None:
        """A step of one token of each, without what it takes to see that it can be."""
        if self.refused is None and len(pieces) <= _TOKENS_ON_GPU:
            self._recorded(((1, 1),) * len(pieces), pieces, None, warm=True)

    def _form(self, pieces: Sequence[Piece]) -> _Form:
        """Of a step that can be recorded; else empty."""
        form = tuple((piece.stretch.length, len(piece.wanted)) for piece in pieces)
        tokens = sum(length for length, _ in form)
        if tokens > (_TOKENS_ON_GPU if self._on_gpu else _TOKENS) or any(piece.scored or not piece.wanted for piece in pieces):
            return ()
        if self._on_gpu and all(each == (1, 1) for each in form):
            return ((1, 1),) * _filled_up(len(form))
        return form

    def _watched(self) -> bool:
        """Whether somebody sees operators, of which a recording shows none; a plan for a GPU does, and stays."""
        return bool(_get_current_dispatch_mode_stack()) and planned_gpu() is None

    def _again(self, step: _Step, way: Way, pieces: Sequence[Piece], tokens_T: Tensor | None, wanted: int) -> Tensor:
        step.inputs.fill(pieces, tokens_T)
        self._cache.begin([piece.stretch for piece in pieces], step.places)
        step.recording.play()
        if way is Way.REPEATED:
            self.repeated += 1
            return step.logits_RV[:wanted]
        found_RV = self._compute(*step.inputs.all)[:wanted]
        step.proven = _alike(found_RV, step.logits_RV[:wanted])
        if not step.proven:
            self._refuse(f"{type(self._model).__name__} computes otherwise each time")
            self._known.clear()
        return found_RV

    def _refuse(self, why: str) -> None:
        self.refused = why
        warnings.warn(f"{why}, in Python; its steps are not recorded, which is slower", stacklevel=2)

    def _recorded(self, form: _Form, pieces: Sequence[Piece], tokens_T: Tensor | None, warm: bool = False) -> Tensor | None:
        if (places := self._cache.places([length for length, _ in form])) is None:
            self.refused = f"{type(self._cache).__name__} has no places that stay"
            return None
        rows: list[int] = []
        count = 0
        for length, wanted in form:
            count += length
            rows += range(count - wanted, count)
        inputs = _Inputs(rows, count, self._device)
        inputs.fill(pieces, tokens_T)
        self._cache.begin([piece.stretch for piece in pieces], places)
        recorder = None if self._on_gpu else Recorder(inputs.tensors, [*places.tensors, *self._model.parameters(), *self._model.buffers()])
        logits_RV = None
        if not warm:
            with nullcontext() if recorder is None else recorder.recording():
                logits_RV = self._compute(*inputs.all)
        try:
            if recorder is None:
                graph = Graph(partial(self._compute, *inputs.all), self._pool)
                self._known[form] = _Step(inputs, places, graph, graph.result)
            elif logits_RV is not None:
                self._known[form] = _Step(inputs, places, recorder.tape(logits_RV), logits_RV)
        except NotRepeatable as why:
            self.refused = str(why)
        others = [form for form in self._known if not (self._on_gpu and set(form) == {(1, 1)})]
        if len(others) > _MOST:
            del self._known[others[0]]
        return logits_RV
