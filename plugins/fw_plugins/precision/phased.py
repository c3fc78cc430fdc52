"""phased: another compute dtype from a step on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from fw.api import Phase, PrecisionPlugin, PrecisionPolicy, UserError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class PhaseConfig:
    """One phase."""

    from_step: int = 0
    """Steps made before it begins."""
    compute: Literal["fp32", "bf16"] = "bf16"
    """Dtype of matrix products, and of activations: 4 or 2 bytes each."""


@dataclass
class PhasedConfig:
    """What is kept in which dtype throughout, and what is computed in which from when on."""

    parameters: Literal["fp32", "bf16"] = "fp32"
    """Dtype of weights and optimizer state in all phases: 4 or 2 bytes per parameter each."""
    phases: list[PhaseConfig] = field(default_factory=list)
    """A list of `{from_step: N, compute: bf16|fp32}`: the dtype of matrix products once N steps have been made. The first one begins at
    0, each at a later step than the one before. Activations take twice the bytes in fp32."""
    accumulate: Literal["fp32", "bf16"] | None = None
    """Dtype of gradients between their micro-batches and the step, in all phases; empty for that of the parameters."""
    full_eval: bool = False
    """Validate and sample on weights converted to the phase's dtype once, without autocast: activations between layers take half the
    bytes in bf16. On a GPU the weights proper wait in host memory meanwhile. `fsdp` does not differ by it."""

    def __post_init__(self) -> None:
        if not self.phases:
            raise UserError("precision.phases: empty; list phases like {from_step: 0, compute: bf16}, or use precision=bf16 or fp32")
        steps = [phase.from_step for phase in self.phases]
        if steps[0] != 0 or any(a >= b for a, b in zip(steps, steps[1:], strict=False)):
            raise UserError(f"precision.phases: they begin at {', '.join(map(str, steps))}; the first must begin at 0, each after the last")


class Phased(PrecisionPlugin):
    """Matrix products in one dtype up to a step and in another from there on; weights, optimizer and reduction stay as they are."""

    api = 1
    Config = PhasedConfig
    config: PhasedConfig

    def policy(self) -> PrecisionPolicy:
        """Of the first phase."""
        return self.phases()[0].policy

    def phases(self) -> Sequence[Phase]:
        """As configured."""
        c = self.config
        parameters = _DTYPES[c.parameters]
        accumulate = None if c.accumulate is None else _DTYPES[c.accumulate]
        return [
            Phase(
                phase.from_step,
                PrecisionPolicy(parameters, _DTYPES[phase.compute], torch.float32, accumulate=accumulate, full_eval=c.full_eval),
            )
            for phase in c.phases
        ]
