"""Recomputation by whole blocks: all of them, some of them, or several at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fw.api import ActivationPlugin, CausalLM, StepSpec, UserError
from fw_plugins.activation.recompute import recompute, recompute_together


class Nothing(ActivationPlugin):
    """Forward keeps all that backward needs: the most memory, no time."""

    api = 1

    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """Nothing changes."""


class Full(ActivationPlugin):
    """Every block is recomputed: of each only its input stays, 1/10 to 1/20 of what it computes, for one more forward (about a third)."""

    api = 1

    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """Block by block."""
        for block in model.blocks:
            recompute(block)


@dataclass
class EveryNConfig:
    """Which blocks."""

    n: int = 2
    """Every n-th block is recomputed, beginning with the n-th; the activations of the others stay."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UserError(f"activation.n: {self.n} is too small; the least is 1")


class EveryN(ActivationPlugin):
    """One of n blocks is recomputed: 1/n of the memory that `full` saves, for 1/n of its time."""

    api = 1
    Config = EveryNConfig
    config: EveryNConfig

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """There must be an n-th block."""
        if self.config.n > len(model.blocks):
            raise UserError(
                f"activation.n: {self.config.n} is more than the model's {len(model.blocks)} blocks: nothing would be recomputed"
            )

    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """The n-th, the 2n-th and so on."""
        for block in model.blocks[self.config.n - 1 :: self.config.n]:
            recompute(block)


@dataclass
class RatioConfig:
    """How many blocks."""

    ratio: float = 0.5
    """Part of the blocks that is recomputed, spread evenly over the depth; rounded to whole blocks."""

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise UserError(f"activation.ratio: {self.ratio} is not between 0 and 1")


class Ratio(ActivationPlugin):
    """A part of the blocks is recomputed, and that part of the memory and time of `full`."""

    api = 1
    Config = RatioConfig
    config: RatioConfig

    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """As evenly as whole blocks allow."""
        blocks = model.blocks
        chosen = round(self.config.ratio * len(blocks))
        for number, block in enumerate(blocks):
            if (number + 1) * chosen // len(blocks) > number * chosen // len(blocks):
                recompute(block)


class Sqrt(ActivationPlugin):
    """Segments of about √L of L blocks are recomputed: √L block inputs stay, and in backward the activations of one segment at a time."""

    api = 1

    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """Segment by segment."""
        for segment in segments(len(model.blocks)):
            recompute_together(model.blocks[segment.start : segment.stop])


def segments(blocks: int) -> list[range]:
    """About √blocks runs of blocks, as equal as can be (Chen et al. 2016, https://arxiv.org/abs/1604.06174)."""
    number = max(1, round(math.sqrt(blocks)))
    bounds = [blocks * i // number for i in range(number + 1)]
    return [range(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
