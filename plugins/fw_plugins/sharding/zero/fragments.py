"""Where DeepSpeed keeps what: the pieces of parameters in the flat tensors it steps, for all stages alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Fragment:
    """``size`` elements of a flattened parameter, from ``start``, that lie at ``place`` in a flat tensor of this rank."""

    name: str
    start: int
    place: int
    size: int

    def of(self, whole: Tensor) -> Tensor:
        """What it is of the whole parameter; a view."""
        return whole.reshape(-1)[self.start : self.start + self.size]

    def within(self, flat: Tensor) -> Tensor:
        """Where it lies in the flat tensor; a view."""
        return flat.narrow(0, self.place, self.size)


class Flats:
    """The flat tensors this rank steps: master weights, each with the fragments in it and its state in the optimizer.

    Args:
        engine: DeepSpeed's.
        shapes: of the whole parameters, by name, in the model's order.
    """

    def __init__(self, engine: Any, named: Sequence[tuple[str, nn.Parameter]], shapes: dict[str, torch.Size]) -> None:
        self._zero = engine.optimizer
        self._base = engine.basic_optimizer
        self._stage3 = hasattr(self._zero, "fp32_partitioned_groups_flat")
        self.shapes = shapes
        self._reading = threading.Lock()
        names = {id(p): name for name, p in named}
        zero = self._zero
        if self._stage3:
            self.fragments = [_partitioned(group, names) for group in zero.fp16_groups]
        else:
            bf16 = hasattr(zero, "bf16_groups")  # stage 1 has an optimizer of its own for bf16 with sums in fp32
            groups, flats = (zero.bf16_groups, zero.bf16_groups_flat) if bf16 else (zero.bit16_groups, zero.bit16_groups_flat)
            self.fragments = [
                _divided(group, flat, own.numel(), names) for group, flat, own in zip(groups, flats, self._tensors, strict=True)
            ]
        self.where = {f.name: (group, f) for group, inside in enumerate(self.fragments) for f in inside}

    @property
    def _tensors(self) -> list[Tensor]:
        zero = self._zero
        if self._stage3:
            return zero.fp32_partitioned_groups_flat
        return zero.single_partition_of_fp32_groups if hasattr(zero, "single_partition_of_fp32_groups") else zero.fp32_groups_flat_partition

    @property
    def device(self) -> torch.device:
        """Where they are, or come to from a disk."""
        return self._tensors[0].device

    def dtype(self, key: str | None = None) -> torch.dtype:
        """Of the master weights, or of their state ``key``."""
        flat = self._tensors[0]
        kept: Tensor = flat if key is None else self._base.state[flat][key]
        return kept.dtype

    @contextmanager
    def opened(self, group: int, written: bool = False) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """A flat tensor and its optimizer state, in memory; read from the disk, and written back, where they live there."""
        flat = self._tensors[group]
        swaps = self._stage3 and self._zero._swappable_optimizer_subgroup(group)
        if swaps:
            self._zero._optimizer_states_and_gradient_swap_in(group)
        try:
            yield flat, self._base.state[flat]
            if written and self._stage3:
                self._zero._reassign_or_swap_out_partitioned_parameters(group)
        finally:
            if swaps and written:
                self._zero._optimizer_states_and_gradient_swap_out(group)
            elif swaps:
                self._zero._release_swap_buffers(group)

    def kept(self) -> list[Tensor]:
        """Master weights and their state, those that are in memory."""
        states = [self._base.state.get(flat, {}) for flat in self._tensors]
        return [*self._tensors, *(value for state in states for value in state.values() if isinstance(value, Tensor))]

    def gradients(self) -> list[Tensor]:
        """Where backward puts them and where they are summed up until the step; each stage has places of its own."""
        places = ("grad_partitions_flat_buffer", "averaged_gradients", "all_grad_tensors", "fp32_groups_gradients_flat")
        return [t for place in places for t in tree_leaves(getattr(self._zero, place, None)) if isinstance(t, Tensor)]

    def publish(self) -> None:
        """Let forward see changed master weights. Collective."""
        if not self._stage3:
            self._zero.update_lp_params()
        elif persistent := self._zero.persistent_parameters:
            self._zero._partition_all_parameters()
            persistent[0].all_gather(persistent)

    def state_keys(self) -> tuple[list[str], list[str]]:
        """Names of the optimizer's state: shaped like the parameters, and single numbers; both empty before the first step."""
        state = self._base.state.get(self._tensors[0], {})
        numbers = [key for key, value in state.items() if not isinstance(value, Tensor) or value.dim() == 0]
        return [key for key in state if key not in numbers], numbers

    def number(self, key: str) -> float:
        """A single number of the state; all flat tensors have the same."""
        return float(self._base.state[self._tensors[0]][key])

    def piece(self, name: str, key: str | None) -> Tensor:
        """This rank's piece of a parameter's master weight, or of its state ``key``. A copy; any thread may ask for it."""
        group, fragment = self.where[name]
        with self._reading, self.opened(group) as (flat, state):
            return fragment.within((flat if key is None else state[key]).detach()).clone()


def _partitioned(group: Sequence[Any], names: dict[int, str]) -> list[Fragment]:
    """Stage 3: each parameter is cut into as many equal pieces as there are ranks, the last ones padded."""
    found, place = [], 0
    for parameter in group:
        size = parameter.partition_numel()
        start = parameter.ds_zero_partition_rank * size
        kept = max(0, min(size, parameter.ds_numel - start))
        if kept:
            found.append(Fragment(names[id(parameter)], start, place, kept))
        place += size
    return found


def _divided(group: Sequence[Tensor], flat: Tensor, partition: int, names: dict[int, str]) -> list[Fragment]:
    """Stages 1 and 2: the parameters of a group are views of one flat tensor, and each rank steps an equal part of it.

    Args:
        partition: elements of such a part.
    """
    found = []
    first = dist.get_rank() * partition
    for parameter in group:
        begin = int(parameter.storage_offset() - flat.storage_offset())
        low, high = max(begin, first), min(begin + parameter.numel(), first + partition)
        if low < high:
            found.append(Fragment(names[id(parameter)], low - begin, low - first, high - low))
    return found
