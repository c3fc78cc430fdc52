"""Which of a model's blocks are alike, so that a few stand for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fw.kinds.model import CausalLM

_REACH = 2
"""Blocks to each side that one may work for: what is gathered ahead, what is freed late."""
_LONGEST = 12
"""Blocks of a period at most, and that may come before the first."""


@dataclass(frozen=True)
class Pattern:
    """Blocks ``[head, head + period · count)`` come in periods that are alike; those before and behind do not count.

    Attributes:
        reach: periods to each side that one may work for.
    """

    head: int
    period: int
    count: int

    @property
    def reach(self) -> int:
        """Periods to each side that one may work for."""
        return ceil(_REACH / self.period)

    @property
    def least(self) -> int:
        """Periods among which one is far enough from both ends to stand for all."""
        return 2 * self.reach + 1


def pattern_of(model: CausalLM) -> Pattern | None:
    """The one by which most blocks can be left out; None where that is none, with two lengths to compare."""
    signatures = _signatures(model)
    for period in range(1, _LONGEST + 1):
        for head in range(_REACH, _LONGEST + 1):
            count = (len(signatures) - head - _REACH) // period
            found = Pattern(head, period, count)
            if count <= found.least + 1:
                break
            middle = signatures[head : head + period * count]
            if middle[period:] == middle[:-period]:
                return found
    return None


def _signatures(model: CausalLM) -> list[Any]:
    """Of each block: all that can be told by looking at it."""
    blocks = model.blocks
    settings = [dict(_settings(block)) for block in blocks]
    numbers = {key for key in settings[0] if _counts([each.get(key) for each in settings])} if blocks else set()
    shapes = model.kv_shapes
    return [
        (
            [(name, type(module), *_hooks(module)) for name, module in block.named_modules()],
            [(name, *_of_tensor(tensor)) for name, tensor in (*block.named_parameters(), *block.named_buffers())],
            {key: value for key, value in settings[i].items() if key not in numbers},
            shapes[i] if i < len(shapes) else None,
        )
        for i, block in enumerate(blocks)
    ]


def _settings(block: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Numbers and words that its modules have as attributes."""
    for name, module in block.named_modules():
        for key, value in vars(module).items():
            if value is None or isinstance(value, bool | int | float | str):
                yield (name, key), value


def _counts(values: Sequence[Any]) -> bool:
    """Whether they are the blocks' own numbers, in which all differ."""
    return all(type(value) is int and value - i == values[0] for i, value in enumerate(values))


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module).get("forward")
    return len(module._forward_pre_hooks), len(module._forward_hooks), getattr(own, "__qualname__", None)


def _of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    placements = tensor.placements if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, tensor.requires_grad, placements
