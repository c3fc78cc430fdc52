"""Attention of a few queries to many keys, in torch's operators.

L keys; Q queries; B sequences, each with one query. N query heads, K key and value heads, which are never repeated in memory, H head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fw.api import capability_of, on_gpu


def attend(
    q_QNH: Tensor,
    k_LKH: Tensor,
    v_LKH: Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: int = 0,
    positions_L: Tensor | None = None,
) -> Tensor:
    """``[Q, N, H]``: each query sees the keys up to its own, and of these the last ``window`` and those of the first ``sinks`` positions.

    Args:
        q_QNH: of the positions of the last Q keys.
        positions_L: of the keys; None where they are one behind another.
    """
    queries, keys = len(q_QNH), len(k_LKH)
    whole = window is None or window >= keys
    q_NQH, k_KLH, v_KLH = (x.transpose(0, 1) for x in (q_QNH, k_LKH, v_LKH))
    if queries > 1 and whole and softcap is None:  # which needs no mask: of a long prompt it would take more than the rest of the step
        if _flash_takes(q_QNH):
            return _flash(q_NQH, k_KLH, v_KLH, scale)
        if queries == keys:
            return _sdpa(q_NQH, k_KLH, v_KLH, None, True, scale)
    if positions_L is None:
        positions_L = torch.arange(keys, device=q_QNH.device)
    seen_QL = _seen(positions_L[-queries:], positions_L, window, sinks)
    if queries == 1:  # for which a fused kernel with query heads in groups is slow
        return attend_to_all(q_QNH, k_LKH[None], v_LKH[None], seen_QL, scale=scale, softcap=softcap)
    if softcap is None:
        return _sdpa(q_NQH, k_KLH, v_KLH, seen_QL, False, scale)
    groups = len(k_KLH)
    q_KRH = q_NQH.reshape(groups, -1, q_NQH.shape[-1])  # the rows of all heads of a group: so its keys and values are not repeated
    scores_KGQL = (softcap * torch.tanh(q_KRH @ k_KLH.mT * (scale / softcap))).unflatten(1, (-1, queries))
    weights_KGQL = scores_KGQL.float().masked_fill(~seen_QL, -torch.inf).softmax(-1).to(v_KLH.dtype)
    return (weights_KGQL.flatten(1, 2) @ v_KLH).unflatten(1, (-1, queries)).flatten(0, 1).transpose(0, 1)


def _seen(of_Q: Tensor, positions_L: Tensor, window: int | None, sinks: int) -> Tensor:
    behind_QL = of_Q[:, None] - positions_L
    if window is None:
        return behind_QL >= 0
    return (behind_QL >= 0) & ((behind_QL < window) | (positions_L < sinks))


def _flash_takes(x: Tensor) -> bool:
    halves = on_gpu(x) and x.dtype in (torch.float16, torch.bfloat16)
    return halves and x.shape[-1] % 8 == 0 and x.shape[-1] <= 256 and (capability_of(x.device) or (0, 0)) >= (8, 0)


def _flash(q_NQH: Tensor, k_KLH: Tensor, v_KLH: Tensor, scale: float) -> Tensor:
    """Without the choice that scaled_dot_product_attention makes: cuDNN, which it prefers on Hopper, plans anew for each pair of lengths,
    and a server's prompts have all lengths. The last query sees the last key, as in :class:`torch.nn.attention.bias.CausalBias`.
    """
    out_1NQH = torch.ops.aten._scaled_dot_product_flash_attention(q_NQH[None], k_KLH[None], v_KLH[None], 0.0, True, False, scale=scale)[0]
    return out_1NQH[0].transpose(0, 1)


def _sdpa(q_NQH: Tensor, k_KLH: Tensor, v_KLH: Tensor, seen_QL: Tensor | None, causal: bool, scale: float) -> Tensor:
    out_1NQH = F.scaled_dot_product_attention(
        q_NQH[None], k_KLH[None], v_KLH[None], attn_mask=seen_QL, is_causal=causal, scale=scale, enable_gqa=len(q_NQH) != len(k_KLH)
    )
    return out_1NQH[0].transpose(0, 1)


QUERIES, KEYS = 4, 128
"""That products of :func:`attend_in_tiles` have: one answer has one query in a step, and a prompt many."""


def attend_in_tiles(
    q_QNH: Tensor,
    start: int,
    keys: Callable[[Tensor], Tensor],
    values: Callable[[Tensor], Tensor],
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: int = 0,
) -> Tensor:
    """As :func:`attend`; what a query gets is the same to the last bit whatever queries are beside it. Products are of as many queries and
    keys as always, from positions on that are multiples of :data:`KEYS`, and are added up in fp32 one after another.

    Args:
        start: the first query's position; the last one's is the last of the sequence.
        keys, values: give those of positions ``[L]``, as ``[L, K, H]``.
    """
    out_QNH, end, dim = torch.empty_like(q_QNH), start + len(q_QNH), q_QNH.shape[-1]
    for first in range(start, end, QUERIES):
        of_Q = torch.arange(first, first + QUERIES, device=q_QNH.device).clamp(max=end - 1)
        oldest = 0 if window is None else first - window + 1
        tiles: list[tuple[Tensor, Tensor]] = []
        for begin in range(0, min(first + QUERIES, end), KEYS):
            if begin + KEYS > oldest or begin < sinks:
                positions_L = torch.arange(begin, begin + KEYS, device=q_QNH.device)
                tiles.append((positions_L, _seen(of_Q, positions_L, window, sinks)))
        # What nobody sees is not read: it may never have been written, and 0 times that may be no number.
        read = [torch.where(seen_QL.any(0), positions_L, of_Q[0]) for positions_L, seen_QL in tiles]
        x_QNH = _aligned(q_QNH[of_Q - start])
        scores: list[Tensor] = []
        for at_L, (_, seen_QL) in zip(read, tiles, strict=True):
            k_KHL = _aligned(keys(at_L)).permute(1, 2, 0).contiguous()
            q_KGQH = x_QNH.unflatten(1, (len(k_KHL), -1)).permute(1, 2, 0, 3).contiguous()
            scores_KGQL = (q_KGQH.flatten(1, 2) @ k_KHL).view(*q_KGQH.shape[:3], KEYS) * scale
            if softcap is not None:
                scores_KGQL = softcap * torch.tanh(scores_KGQL / softcap)
            scores.append(scores_KGQL.masked_fill_(~seen_QL, -torch.inf))
        most_KGQ1 = torch.stack([scores_KGQL.amax(-1, keepdim=True) for scores_KGQL in scores]).amax(0)
        total_KGQ1, sum_KSH = torch.zeros_like(most_KGQ1), None
        for at_L, scores_KGQL in zip(read, scores, strict=True):
            weights_KGQL = scores_KGQL.sub_(most_KGQ1).exp_()
            total_KGQ1 += weights_KGQL.sum(-1, keepdim=True)
            added_KSH = weights_KGQL.flatten(1, 2) @ _aligned(values(at_L)).transpose(0, 1).contiguous()
            sum_KSH = added_KSH if sum_KSH is None else sum_KSH.add_(added_KSH)
        assert sum_KSH is not None
        found_QNH = (sum_KSH.view(*most_KGQ1.shape[:3], -1) / total_KGQ1).permute(2, 0, 1, 3).flatten(1, 2)
        out_QNH[first - start : first - start + QUERIES] = found_QNH[: end - first, :, :dim]
    return out_QNH


def _aligned(x_LKH: Tensor) -> Tensor:
    """In fp32, with zeros behind it up to a multiple of 64 bytes: libraries treat rows otherwise that begin elsewhere."""
    return F.pad(x_LKH.float(), (0, -x_LKH.shape[-1] % 16))


def attend_to_all(q_BNH: Tensor, k_BLKH: Tensor, v_BLKH: Tensor, seen_BL: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
    """``[B, N, H]``: of each sequence one query, which sees the keys that ``seen_BL`` is True for."""
    kv_heads = k_BLKH.shape[2]
    q_BKGH = q_BNH.unflatten(1, (kv_heads, -1))
    k_BKLH, v_BKLH = k_BLKH.transpose(1, 2), v_BLKH.transpose(1, 2)
    scores_BKGL = q_BKGH @ k_BKLH.transpose(-1, -2) * scale
    if softcap is not None:
        scores_BKGL = softcap * torch.tanh(scores_BKGL / softcap)
    weights_BKGL = scores_BKGL.float().masked_fill(~seen_BL[:, None, None], -torch.inf).softmax(-1).to(v_BKLH.dtype)
    return (weights_BKGL @ v_BKLH).flatten(1, 2)
