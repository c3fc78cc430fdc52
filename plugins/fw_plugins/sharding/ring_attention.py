"""Causal attention over sequences divided between ranks, keys and values passed round (Liu et al. 2023, https://arxiv.org/abs/2310.01889).

A sequence is cut into 2 · C chunks, and rank r has chunks r and 2 · C - 1 - r: so every rank computes the same number of scores in every
round. Partial results are merged by their logarithms of sums of exponentials, with torch's own flash kernels, forward and backward.

l = L ÷ C, the positions of one rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fw.api import gpu_capability, on_gpu

_aten = torch.ops.aten


def cut(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's two chunks of dimension 1."""
    rank, chunks = mesh.get_local_rank(), x.chunk(2 * mesh.size(), dim=1)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim=1)


def has_kernel(q: Tensor) -> bool:
    """Whether torch has a flash kernel that gives the logarithms too: on the CPU, and for halves on GPUs that have it."""
    if not on_gpu(q):
        return q.device.type == "cpu"
    capability = gpu_capability(torch.device("cuda"))
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256  # the kernel is called as it is, and pads nothing
    return fits and q.dtype in (torch.float16, torch.bfloat16) and capability is not None and capability >= (8, 0)


def ring_attention(q_BNlH: Tensor, k_BKlH: Tensor, v_BKlH: Tensor, scale: float, mesh: DeviceMesh) -> Tensor:
    """Attention of this rank's queries to all keys before them, in chunks as :func:`cut` gives them; K divides N."""
    out_BNlH: Tensor = _apply(q_BNlH, k_BKlH, v_BKlH, scale, mesh)
    return out_BNlH


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BNlH: Tensor, k_BKlH: Tensor, v_BKlH: Tensor, scale: float, mesh: DeviceMesh) -> Tensor:
        group, rank, ranks = q_BNlH.shape[1] // k_BKlH.shape[1], mesh.get_local_rank(), mesh.size()
        out_BNlH = torch.zeros_like(q_BNlH, dtype=torch.float32)
        lse_BNl = torch.full(q_BNlH.shape[:3], float("-inf"), dtype=torch.float32, device=q_BNlH.device)
        passing = torch.stack((k_BKlH, v_BKlH))
        for turn in range(ranks):
            following = _pass_on(passing, mesh) if turn < ranks - 1 else None  # under way while this turn computes
            k, v = passing
            queries, keys = _parts(q_BNlH, rank, (rank - turn) % ranks)
            part, part_lse = _forward(q_BNlH[:, :, queries], _repeat(k[:, :, keys], group), _repeat(v[:, :, keys], group), turn == 0, scale)
            _merge(out_BNlH[:, :, queries], lse_BNl[:, :, queries], part.float(), part_lse)
            passing = following.wait() if following is not None else passing
        out_BNlH = out_BNlH.to(q_BNlH.dtype)
        ctx.save_for_backward(q_BNlH, k_BKlH, v_BKlH, out_BNlH, lse_BNl)
        ctx.scale, ctx.mesh = scale, mesh
        return out_BNlH

    @staticmethod
    def backward(ctx: Any, grad_BNlH: Tensor) -> tuple[Tensor | None, ...]:
        q_BNlH, k_BKlH, v_BKlH, out_BNlH, lse_BNl = ctx.saved_tensors
        mesh, scale = ctx.mesh, ctx.scale
        group, rank, ranks = q_BNlH.shape[1] // k_BKlH.shape[1], mesh.get_local_rank(), mesh.size()
        grad_q = torch.zeros_like(q_BNlH, dtype=torch.float32)
        passing = torch.stack((k_BKlH, v_BKlH))
        grads_passing = torch.zeros_like(passing, dtype=torch.float32)  # of the keys and values that are here, and go round with them
        for turn in range(ranks):
            following = _pass_on(passing, mesh) if turn < ranks - 1 else None
            k, v = passing
            queries, keys = _parts(q_BNlH, rank, (rank - turn) % ranks)
            dq, dk, dv = _backward(
                grad_BNlH[:, :, queries],
                q_BNlH[:, :, queries],
                _repeat(k[:, :, keys], group),
                _repeat(v[:, :, keys], group),
                out_BNlH[:, :, queries],
                lse_BNl[:, :, queries],
                turn == 0,
                scale,
            )
            grad_q[:, :, queries] += dq
            for grads, new in zip(grads_passing, (dk, dv), strict=True):
                grads[:, :, keys] += new.float().unflatten(1, (-1, group)).sum(2)
            grads_passing = _pass_on(grads_passing, mesh).wait()  # after the last turn they are where they belong
            passing = following.wait() if following is not None else passing
        grad_k, grad_v = grads_passing.to(k_BKlH.dtype)
        return grad_q.to(q_BNlH.dtype), grad_k, grad_v, None, None


_apply = torch.compiler.disable(_Ring.apply)


def _parts(q: Tensor, rank: int, source: int) -> tuple[slice, slice]:
    """Which of this rank's queries see which of the keys of rank ``source``; all of those then see all of these."""
    length, half = q.shape[2], q.shape[2] // 2
    if source == rank:
        return slice(0, length), slice(0, length)  # causally
    return (slice(0, length), slice(0, half)) if source < rank else (slice(half, length), slice(0, length))


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a part of the keys to what the others gave, in place."""
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp()[..., None]).add_(part * (part_lse - total).exp()[..., None])
    lse.copy_(total)


def _repeat(x_BKlH: Tensor, group: int) -> Tensor:
    return x_BKlH.repeat_interleave(group, 1) if group > 1 else x_BKlH


class _pass_on:
    """To the next rank, from the one before."""

    def __init__(self, x: Tensor, mesh: DeviceMesh) -> None:
        group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._sent, self._received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        to, source = (dist.get_global_rank(group, r % ranks) for r in (rank + 1, rank - 1))
        transfers = [dist.P2POp(dist.isend, self._sent, to, group), dist.P2POp(dist.irecv, self._received, source, group)]
        self._works = dist.batch_isend_irecv(transfers)

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention over some keys, and the logarithms of its sums of exponentials ``[B, N, l]`` in fp32."""
    if on_gpu(q):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    else:
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from the result and the logarithms over all keys."""
    lse = lse.contiguous()
    if not on_gpu(q):
        grads: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return grads
    none = torch.empty(0, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
    found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
    )
    return found
