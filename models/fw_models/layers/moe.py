"""Mixture of experts: a router sends each token to a few of many feed-forward networks (Shazeer et al. 2017,
https://arxiv.org/abs/1701.06538; Fedus et al. 2021, https://arxiv.org/abs/2101.03961)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw_models.layers.grouped import grouped_linear


class Experts(nn.Module):
    """E SwiGLU networks, stacked: ``gate`` and ``up`` are ``[E, F, D]``, ``down`` is ``[E, D, F]``."""

    def __init__(self, experts: int, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Parameter(torch.empty(experts, intermediate_size, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(experts, intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden_size, intermediate_size))

    def forward(self, x_TD: Tensor, chosen_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Each token's weighted sum over its chosen experts, ``[T, D]``.

        Tokens are copied once per expert and sorted by expert, so every size is T · k whatever the router decides.
        """
        experts, (tokens, k) = self.gate_proj.shape[0], chosen_Tk.shape
        sorted_S, order_S = chosen_Tk.flatten().sort(stable=True)
        ends_E = torch.searchsorted(sorted_S, torch.arange(experts, device=x_TD.device), right=True, out_int32=True)
        rows_SD = x_TD.index_select(0, order_S // k)
        hidden_SF = F.silu(grouped_linear(rows_SD, self.gate_proj, ends_E)) * grouped_linear(rows_SD, self.up_proj, ends_E)
        out_SD = grouped_linear(hidden_SF, self.down_proj, ends_E)
        place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(tokens * k, device=x_TD.device))
        out_TkD = out_SD.index_select(0, place_S).unflatten(0, (tokens, k))
        return (out_TkD * weights_Tk[..., None].to(out_TkD.dtype)).sum(1)


class MoE(nn.Module):
    """Router and experts. The router's probabilities are taken in fp32.

    Args:
        top_k: experts per token.
        normalise: make the chosen experts' probabilities add up to one.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, experts: int, top_k: int, *, normalise: bool) -> None:
        super().__init__()
        self.top_k = top_k
        self.normalise = normalise
        self.gate = nn.Linear(hidden_size, experts, bias=False)
        self.experts = Experts(experts, hidden_size, intermediate_size)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, L, D]`` → ``[B, L, D]``, and the router's logits ``[B, L, E]``."""
        logits_BLE = self.gate(x_BLD)
        weights_BLk, chosen_BLk = logits_BLE.float().softmax(-1).topk(self.top_k, dim=-1)
        if self.normalise:
            weights_BLk = weights_BLk / weights_BLk.sum(-1, keepdim=True)
        out_TD = self.experts(x_BLD.flatten(0, 1), chosen_BLk.flatten(0, 1), weights_BLk.flatten(0, 1))
        return out_TD.view_as(x_BLD), logits_BLE


def balance_loss(
    logits: Sequence[Tensor], top_k: int, counted_BL: Tensor | None, over_ranks: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """``E · Σ_e (share of tokens sent to e) · (mean probability of e)`` over the tokens of all blocks, a fp32 scalar.

    Equation 4 of Fedus et al. 2021, shares counted per choice, so that a balanced router has ``top_k``. As transformers computes it.

    Args:
        logits: the routers' ``[B, L, E]``, one per block.
        counted_BL: bool; False for padding. None where every token counts.
        over_ranks: adds up a tensor over the ranks that divide the sequences.
    """
    experts = logits[0].shape[-1]
    probabilities_NTE = torch.stack([block.flatten(0, 1) for block in logits]).float().softmax(-1)
    chosen_NTk = probabilities_NTE.topk(top_k, dim=-1).indices
    sent_NTE = torch.zeros_like(probabilities_NTE).scatter_(-1, chosen_NTk, 1.0)
    counted_T1 = torch.ones_like(probabilities_NTE[0, :, :1]) if counted_BL is None else counted_BL.flatten()[:, None].float()
    sums = torch.cat([(value * counted_T1).sum((0, 1)) for value in (sent_NTE, probabilities_NTE)] + [counted_T1.sum(0) * len(logits)])
    sent_E, probability_E, tokens = over_ranks(sums).split((experts, experts, 1))
    tokens = tokens.clamp(min=1)
    return experts * (sent_E / tokens * (probability_E / tokens)).sum()
