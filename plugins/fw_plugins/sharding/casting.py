"""What autocast can cast to and what it leaves alone, for shardings that leave the compute dtype to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fw.api import CausalLM, StepSpec, UserError


def check(spec: StepSpec) -> None:
    """Refuse parameters in fewer bits than are computed in: autocast knows 16-bit dtypes only.

    Raises:
        UserError: with what would work.
    """
    if spec.precision.parameters != torch.float32 and torch.float32 in spec.computes_in:
        raise UserError(
            "precision.phases: compute fp32 from parameters in bf16 is nothing torch's autocast does, which casts to 16 bits only; use"
            " precision.parameters=fp32, or sharding=fsdp, which casts what it gathers"
        )


def widen_lookups(model: CausalLM, dtype: torch.dtype) -> None:
    """Have embeddings that are kept in fewer bits than ``dtype`` give rows in it, as those that train do: autocast leaves lookups alone,
    and what passes between blocks would have their dtype."""

    def widen(module: nn.Module, _: object, output: Tensor) -> Tensor:
        return output.to(dtype) if torch.is_autocast_enabled(output.device.type) else output

    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.weight.dtype != dtype:
            module.register_forward_hook(widen)
