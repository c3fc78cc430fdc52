"""The peak of one training step, by what it is for."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from fw.kinds.sharding import Stepper
from fw.meter.allocations import UNNAMED, Allocations, allocations

WEIGHTS, GATHERED, COPIES, OPTIMIZER = "weights", "gathered weights", "weight copies", "optimizer state"
GRADIENTS, ACTIVATIONS, HEAD, OTHER = "gradients", "activations", "head and loss", "other"

CATEGORIES = {
    WEIGHTS: "parameters as this rank keeps them",
    GATHERED: "parameters of other ranks, while a block computes",
    COPIES: "parameters converted to the compute dtype, kept for backward",
    OPTIMIZER: "what the optimizer keeps from step to step",
    GRADIENTS: "gradients of parameters",
    ACTIVATIONS: "what is left for backward when the last block's forward ends",
    HEAD: "what final norm, head and loss leave for backward besides",
    UNNAMED: "all else a step allocates: results on their way, gradients of activations, what is recomputed",
    OTHER: "what was there before the step and is none of these: batches, buffers, an engine's own",
}
"""In the order in which they are shown."""


@dataclass(frozen=True)
class StepMemory:
    """The peak of a step by the allocator's own events.

    Attributes:
        phase: forward, backward or update.
        by_category: bytes of :data:`CATEGORIES` at that moment; their sum is ``peak_bytes``.
    """

    peak_bytes: int
    phase: str
    by_category: dict[str, int]


class StepMeter:
    """Measures a step that tells it where it stands.

    Categories follow from when memory is allocated and what it becomes: gradients and gathered parameters are noted by hooks, copies of
    weights by the conversions the profiler sees (none inside compiled blocks, where they count as activations).

    Args:
        blocks: the model's; what is alive after the last one's forward are activations.
    """

    def __init__(self, stepper: Stepper, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._stepper, self._blocks, self._device = stepper, blocks, device
        self._found = Allocations()
        self._in_forward = False
        self._handles: list[RemovableHandle] = []
        self._seen: set[int] = set()

    @contextmanager
    def step(self) -> Iterator[list[StepMemory]]:
        """Around a step; the list has its one element at the end."""
        result: list[StepMemory] = []
        gc.collect()
        with allocations(self._device, copies={WEIGHTS: COPIES, GATHERED: COPIES}) as found:
            self._found = found
            kept = self._stepper.kept()
            found.known(WEIGHTS, self._here(kept.weights))
            found.known(GRADIENTS, self._here(kept.gradients))
            found.known(OPTIMIZER, self._here(kept.optimizer))
            found.known(OTHER, self._here(_all_tensors()))
            handles = [self._stepper.module.register_forward_pre_hook(self._before)]
            handles += [block.register_forward_pre_hook(self._before) for block in self._blocks]
            handles.append(self._blocks[-1].register_forward_hook(self._after_blocks))
            try:
                yield result
            finally:
                for handle in (*handles, *self._handles):
                    handle.remove()
                self._handles, self._seen = [], set()
            found.name(OPTIMIZER, self._here(self._stepper.kept().optimizer))  # a first step has made it
        phase = found.peak_after or "forward"
        result.append(StepMemory(sum(found.at_peak.values()), phase, {k: v for k, v in found.at_peak.items() if v}))

    def forward(self) -> None:
        """A forward begins."""
        self._in_forward = True
        self._found.mark("forward")

    def backward(self) -> None:
        """A forward has ended, and its backward begins."""
        self._in_forward = False
        self._found.name_rest(HEAD)
        self._found.mark("backward")

    def update(self) -> None:
        """A backward has ended; an update or another forward follows."""
        self._found.name(GRADIENTS, self._here(self._stepper.kept().gradients))
        self._found.mark("update")

    def _here(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]

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

    def __init__(self, found: Allocations, parameter: Tensor) -> None:
        self._found, self._parameter = found, parameter

    def __call__(self, grad: Tensor) -> None:
        if not isinstance(grad, DTensor):
            self._found.name(GRADIENTS, [grad])
        if self._parameter.untyped_storage().nbytes():
            self._found.name(GATHERED, [self._parameter])


def _all_tensors() -> list[Tensor]:
    """Every tensor Python knows of whose memory is one allocation."""
    return [found for found in gc.get_objects() if type(found) in (Tensor, nn.Parameter) and found.layout == torch.strided]
