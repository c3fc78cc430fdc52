"""Which elements of which parameters each rank steps in stages 1 and 2, before there is an engine."""

from __future__ import annotations

from itertools import accumulate

from fw.api import CausalLM, StepSpec
from fw_plugins.sharding.torch_stepper import parameter_groups
from fw_plugins.sharding.zero.config import ZeroConfig


def pieces(config: ZeroConfig, spec: StepSpec, model: CausalLM, ranks: int, rank: int) -> tuple[int, ...]:
    """Elements of the parameters that a rank steps a piece of, whose gradients it may keep whole; then, for each group, the parameters'
    sizes and where in them the pieces begin and end.

    A group's parameters lie one after another, padded at the end, and are cut into equal parts (``get_partition_info`` and
    ``align_dense_tensors`` of deepspeed 0.19).
    """
    whole, found = 0, []
    for group in parameter_groups(model.named_parameters(), model.whole_undecayed(), spec.optimizer.weight_decay):
        sizes = _in_order([p.numel() for p in group["params"]], ranks if config.round_robin_gradients else 1)
        alignment = _alignment(spec) if config.parameter_alignment else 1
        begins = list(accumulate((_up(size, alignment) for size in sizes[:-1]), initial=0))
        part = _up(begins[-1] + sizes[-1], 2 * ranks) // ranks
        for begin, size in zip(begins, sizes, strict=True):
            low, high = max(begin, rank * part), min(begin + size, (rank + 1) * part)
            if low < high:
                whole += size
                found += [size, low - begin, high - begin]
        found.append(-1)
    return whole, *found


def _in_order(sizes: list[int], hands: int) -> list[int]:
    """Dealt out in turn, and put down one hand after another."""
    return [size for hand in range(hands) for size in sizes[hand::hands]]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _alignment(spec: StepSpec) -> int:
    """Elements of 16 bytes."""
    return 16 // spec.precision.compute.itemsize
