"""The memory of one training step over time, by what it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fw.kinds.sharding import Stepper
from fw.meter.account import UNNAMED, Block, History, Recorder, Rules
from fw.meter.allocations import allocations
from fw.meter.by_module import ELSEWHERE, EMBEDDING, HEAD as AFTER_BLOCKS, Places, nbytes
from fw.meter.detail import Timeline, by_module_at, most_by_module

WEIGHTS, GATHERED, COPIES, OPTIMIZER, BUFFERS = "weights", "gathered weights", "weight copies", "optimizer state", "buffers"
GRADIENTS, ACTIVATIONS, HEAD, EXCHANGED, INPUTS, OTHER = "gradients", "activations", "head and loss", "exchanged", "inputs", "other"
KV = "keys and values"

CATEGORIES = {
    WEIGHTS: "parameters as this rank keeps them",
    GATHERED: "parameters of other ranks, while a block computes",
    COPIES: "parameters converted to the compute dtype, kept for backward",
    OPTIMIZER: "what the optimizer keeps from step to step",
    GRADIENTS: "gradients of parameters",
    ACTIVATIONS: "what is left for backward when the last block's forward ends",
    HEAD: "what final norm, head and loss leave for backward besides",
    EXCHANGED: "what ranks send and receive",
    UNNAMED: "all else a step allocates: results on their way, gradients of activations, what is recomputed",
    BUFFERS: "what the model keeps besides parameters",
    INPUTS: "the step's batches",
    OTHER: "what was there before the step and is none of these: batches read ahead, an engine's own; rounding of a GPU's allocator",
}
"""In the order in which they are shown."""

RULES = Rules(copies={WEIGHTS: COPIES, GATHERED: COPIES}, exchanged=EXCHANGED, unknown=OTHER)


COMPONENT_OF = {
    WEIGHTS: "parameters",
    GATHERED: "communication",
    COPIES: "activations",
    OPTIMIZER: "optimizer",
    GRADIENTS: "gradients",
    ACTIVATIONS: "activations",
    HEAD: "activations",
    EXCHANGED: "communication",
    UNNAMED: "temporary",
    BUFFERS: "buffers",
    INPUTS: "inputs",
    KV: "kv",
    OTHER: "other",
}
"""Of the document (:mod:`fw.meter.document`) that each category is part of."""


@dataclass(frozen=True)
class StepMemory:
    """The peak of a step, and how it came to it.

    Attributes:
        low_bytes: the least it may be, where something may be gone earlier.
        phase: forward, backward or step.
        by_category: bytes of :data:`CATEGORIES` at that moment; their sum is ``peak_bytes``.
        at_peak: the same by component of the document.
        most: the most of each component at any time in the step.
        timeline: how much of each category there was in the course of the step.
        modules: what each block keeps, and what is before and after them: weights, gradients, optimizer state, activations.
        parameters: of the model, over all ranks.
        phases: components at the highest moment of forward, backward and step.
    """

    peak_bytes: int
    low_bytes: int
    phase: str
    by_category: dict[str, int]
    at_peak: dict[str, int]
    most: dict[str, int]
    timeline: Timeline
    modules: dict[str, dict[str, int]]
    parameters: int
    phases: dict[str, dict[str, int]]

    @staticmethod
    def of(history: History, modules: dict[str, dict[str, int]], parameters: int) -> StepMemory:
        """By what a recording has found."""
        fine, coarse = history.account(), history.account(COMPONENT_OF)
        by_category = {category: nbytes for category, nbytes in fine.at_peak.items() if nbytes}
        peaks = (fine.peak_bytes, fine.low_bytes, fine.peak_after or "forward")
        phases = {name: found for name, found in coarse.phases.items() if name}
        return StepMemory(*peaks, by_category, coarse.at_peak, coarse.most, Timeline.of(history), modules, parameters, phases)


Recording = Callable[[torch.device, Rules], AbstractContextManager[Recorder]]
"""Records allocations on a device while the context is open."""


class StepMeter:
    """Measures a step that tells it where it stands.

    Categories follow from when memory is allocated and what it becomes: gradients and gathered parameters are noted by hooks, copies of
    weights by the conversions a recording sees (none inside compiled blocks, where they count as activations).

    Args:
        blocks: the model's; what is alive after the last one's forward are activations.
        recording: what sees the allocations.
        beside: weights of another model that the step computes with.
    """

    def __init__(
        self,
        stepper: Stepper,
        blocks: Sequence[nn.Module],
        device: torch.device,
        recording: Recording = allocations,
        beside: Sequence[Tensor] = (),
    ) -> None:
        self._stepper, self._blocks, self._device, self._recording, self._beside = stepper, blocks, device, recording, beside
        self._in_forward = False
        self._handles: list[RemovableHandle] = []
        self._seen: set[int] = set()
        self._places = Places(stepper, blocks)
        self._gradients: dict[str, int] = {}
        self.left: list[Block] = []
        """What the last step has made and was there at its end."""

    @contextmanager
    def step(self, inputs: Sequence[Tensor] = ()) -> Iterator[list[StepMemory]]:
        """Around a step on ``inputs``; the list has its one element at the end."""
        result: list[StepMemory] = []
        with self._recording(self._device, RULES) as found:
            self._found, self._begun = found, False
            kept = self._stepper.kept()
            found.known(WEIGHTS, kept.weights)
            found.known(WEIGHTS, self._beside)
            found.known(BUFFERS, kept.buffers)
            found.known(GRADIENTS, kept.gradients)
            found.known(OPTIMIZER, kept.optimizer)
            found.known(INPUTS, inputs)
            found.known_rest(OTHER)
            handles = [self._stepper.module.register_forward_pre_hook(self._before)]
            handles += [block.register_forward_pre_hook(self._before) for block in self._blocks]
            handles.append(self._blocks[-1].register_forward_hook(self._after_blocks))
            handles += self._places.follow(found, lambda: self._in_forward)
            try:
                yield result
            finally:
                for handle in (*handles, *self._handles):
                    handle.remove()
                self._handles, self._seen = [], set()
            self._found.enter("")
            found.name(OPTIMIZER, self._stepper.kept().optimizer)  # a first step has made it
        self.left = found.history.left
        result.append(StepMemory.of(found.history, self._modules(found.history), self._stepper.parameter_count()))

    def forward(self) -> None:
        """A forward begins."""
        self._in_forward = True
        if not self._begun:  # what the step has set up by now is for none of what follows
            self._found.name_rest(OTHER)
            self._begun = True
        self._found.mark("forward")
        self._found.enter(EMBEDDING)

    def backward(self) -> None:
        """A forward has ended, and its backward begins."""
        self._in_forward = False
        self._found.name_rest(HEAD)
        self._found.mark("backward")
        self._found.enter(AFTER_BLOCKS)

    def update(self) -> None:
        """A backward has ended; an update or another forward follows."""
        self._found.name(GRADIENTS, self._stepper.kept().gradients)
        self._found.mark("step")
        self._gradients = {name: nbytes(kept.gradients) for name, kept in self._places.of_parameters().items()}

    def _modules(self, history: History) -> dict[str, dict[str, int]]:
        """What each module keeps by category; what is no module's own, or not known to be, in a row of its own."""
        kept = self._places.of_parameters()
        if not any(self._gradients.values()):  # updated in backward, one after another
            self._gradients = most_by_module(history, (GRADIENTS,))
        left = by_module_at(history, (ACTIVATIONS, COPIES, HEAD), "backward")
        rows = {
            name: {
                WEIGHTS: nbytes(own.weights),
                GRADIENTS: self._gradients.pop(name, 0),
                OPTIMIZER: nbytes(own.optimizer),
                ACTIVATIONS: left.pop(name, 0),
            }
            for name, own in kept.items()
        }
        whole = history.account().most
        rest = {category: whole.get(category, 0) - sum(row[category] for row in rows.values()) for category in (WEIGHTS, OPTIMIZER)}
        rest |= {GRADIENTS: sum(self._gradients.values()), ACTIVATIONS: sum(left.values())}
        if any(nbytes > 0 for nbytes in rest.values()):
            rows[ELSEWHERE] = {category: max(0, nbytes) for category, nbytes in rest.items()}
        return rows

    def _before(self, module: nn.Module, args: Any) -> None:
        """Parameters are as forward uses them: where ranks divide them, gathered just now."""
        plain = [p for p in module.parameters() if not isinstance(p, DTensor) and p.untyped_storage().nbytes()]
        self._found.name(GATHERED, plain)  # those this rank keeps have their category
        for parameter in plain:
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._seen:
                self._seen.add(id(parameter))
                self._handles.append(parameter.register_hook(_Noted(self._found, parameter)))

    def _after_blocks(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._in_forward:  # and not in a repetition
            self._found.name_rest(ACTIVATIONS)


class _Noted:
    """Called with a parameter's gradient as it is made, while the parameter is in use."""

    def __init__(self, found: Recorder, parameter: Tensor) -> None:
        self._found, self._parameter = found, parameter

    def __call__(self, grad: Tensor) -> None:
        if not isinstance(grad, DTensor):
            self._found.name(GRADIENTS, [grad])
        if self._parameter.untyped_storage().nbytes():
            self._found.name(GATHERED, [self._parameter])
