"""A layer with a low-rank change beside its weight: ``W x + s · B A x`` (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

Shape suffixes: I features in, O features out, R rank, V rows of an embedding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.api import LowRankChange, adapters_are_off
from fw.api.kernels import lowrank, matrix
from fw_plugins.peft.changed import become, unchanged


class LoraLinear(nn.Linear):
    """``W x + b + s · B A dropout(x)``."""

    lora_A: nn.Parameter
    """``[R, I]``."""
    lora_B: nn.Parameter
    """``[O, R]``."""
    lora_scale: float
    lora_dropout: float

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        drops = self.training and self.lora_dropout > 0
        by_kernel = not adapters_are_off() and not drops and lowrank.takes(x_I, self.lora_A, self.lora_B, self.weight)
        whole = type(self) is LoraLinear and not torch.compiler.is_compiling()  # else what is computed beside it is torch's own
        if by_kernel and whole and not any(p.requires_grad for p in (self.weight, self.bias) if p is not None):
            return lowrank.changed(x_I, self.weight, self.bias, self.lora_A, self.lora_B, self.lora_scale)
        out_O = super().forward(x_I)
        if adapters_are_off():
            return out_O
        if by_kernel and out_O.dtype == torch.bfloat16:
            return lowrank.added(out_O, x_I, self.lora_A, self.lora_B, self.lora_scale)
        x_I = F.dropout(x_I, self.lora_dropout, self.training)
        low_R = F.linear(x_I, self.lora_A) * self.lora_scale
        # One product that adds: what it adds to is not kept for backward, and there is no third tensor of that size.
        return torch.addmm(out_O.flatten(0, -2), low_R.flatten(0, -2), self.lora_B.t()).view(out_O.shape)

    def apart(self) -> tuple[nn.Module, LowRankChange] | None:
        """The layer that it was, and what changes it; None where it does more."""
        was = unchanged(self, LoraLinear, ("lora_A", "lora_B"))
        return None if was is None else (was, LowRankChange(self.lora_A.detach(), self.lora_B.detach(), self.lora_scale))


class DoraLinear(LoraLinear):
    """``m ∘ (W x + s B A x) / ‖W + s B A‖ + b``, norms of rows (Liu et al. 2024, https://arxiv.org/abs/2402.09353, section 4.3: no gradient
    goes through the norm). With dropout, as in peft, ``W x`` itself is of the whole input."""

    lora_magnitude_vector: nn.Parameter
    """``[O]``."""

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        out_O = super(LoraLinear, self).forward(x_I)
        if adapters_are_off():
            return out_O
        kept_I = F.dropout(x_I, self.lora_dropout, self.training)
        if kept_I is not x_I:
            plain_O = F.linear(kept_I, self._dense(self.weight.dtype if self._is_plain else kept_I.dtype))
        elif self.bias is not None:
            plain_O = out_O - self.bias.to(out_O.dtype)
        else:
            plain_O = out_O
        change_O = F.linear(F.linear(kept_I, self.lora_A) * self.lora_scale, self.lora_B)
        factor_O = (self.lora_magnitude_vector / self._row_norms()).to(out_O.dtype)
        return out_O + (factor_O - 1) * plain_O + factor_O * change_O

    def apart(self) -> None:
        """Its weight is scaled, too."""

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        with torch.autocast(self.weight.device.type, enabled=False):
            dtype = self.lora_magnitude_vector.dtype
            changed_OI = torch.addmm(self._dense(dtype), self.lora_B, self.lora_A, alpha=self.lora_scale)
            return torch.linalg.vector_norm(changed_OI, dim=1)

    @property
    def _is_plain(self) -> bool:
        """Whether the weight is one, and not the codes of one."""
        return not hasattr(self, "dense_weight")

    def _dense(self, dtype: torch.dtype) -> Tensor:
        made: Tensor = self.weight.to(dtype) if self._is_plain else self.dense_weight(dtype)  # type: ignore[operator]
        return made


class LoraEmbedding(nn.Embedding):
    """``E[id] + s · (B A)ᵀ[id]``."""

    lora_embedding_A: nn.Parameter
    """``[R, V]``."""
    lora_embedding_B: nn.Parameter
    """``[D, R]``."""
    lora_scale: float

    def forward(self, ids: Tensor) -> Tensor:
        """``[…]`` → ``[…, D]``."""
        out_D = super().forward(ids)
        if adapters_are_off():
            return out_D
        low_R = F.embedding(ids, self.lora_embedding_A.t(), self.padding_idx)
        return out_D + F.linear(low_R, self.lora_embedding_B) * self.lora_scale


def add_to_linear(module: nn.Linear, rank: int, scale: float, dropout: float, magnitude: bool = False) -> None:
    """Make it a :class:`LoraLinear`, with ``magnitude`` a :class:`DoraLinear`; what is added has no values yet."""
    shapes: dict[str, tuple[int, ...]] = {"lora_A": (rank, module.in_features), "lora_B": (module.out_features, rank)}
    if magnitude:
        shapes["lora_magnitude_vector"] = (module.out_features,)
    become(module, DoraLinear if magnitude else LoraLinear, shapes)
    matrix.available()  # before a compiled block asks
    module.lora_scale, module.lora_dropout = scale, dropout  # type: ignore[assignment]


def add_to_embedding(module: nn.Embedding, rank: int, scale: float) -> None:
    """Make it a :class:`LoraEmbedding`; A and B have no values yet."""
    become(module, LoraEmbedding, {"lora_embedding_A": (rank, module.num_embeddings), "lora_embedding_B": (module.embedding_dim, rank)})
    module.lora_scale = scale  # type: ignore[assignment]
