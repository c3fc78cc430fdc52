"""Tests of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fw.api import Pattern, UserError
from fw.testing.models import ids, small_llama, with_values
from fw.testing.probe import Probe
from fw.testing.trained import DDP, FSDP, TrainedSuite

LENGTH = 24
VARYING: dict[str, Any] = {"name": "synthetic", "vocab_size": 128, "samples": 192, "min_length": 8}
SEGMENTS = [[1] * 5 + [2] * 12 + [3] * 7, [1] * 20 + [0] * 4]
PATTERNS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 5},
    "segments": {"segments": True},
    "window in segments": {"window": 3, "segments": True},
    "softcap": {"softcap": 2.0},
}


class AttentionSuite(TrainedSuite):
    """Attention against the formula written out in float64, for each pattern; those that are not among :attr:`patterns` are refused.

    Attributes:
        patterns: names of :data:`PATTERNS`.
        tolerance: absolute, of results and gradients in fp32.
    """

    patterns: ClassVar[frozenset[str]] = frozenset(PATTERNS)
    tolerance: ClassVar[float] = 1e-5
    probes: ClassVar[Mapping[str, Probe]] = {
        "ddp": Probe(DDP),
        "fsdp": Probe(FSDP),
        "dropout": Probe({"model": {"attention_dropout": 0.1}}, tolerance=None),
        "packing": Probe({"train": {"packing": True}, "data": VARYING}, tolerance=None),
    }

    @pytest.mark.parametrize("size", [8, 16], ids=["heads of 8", "heads of 16"])  # kernels differ in what they take
    @pytest.mark.parametrize("kv_heads", [4, 2, 1])
    @pytest.mark.parametrize("pattern", list(PATTERNS))
    def test_results_and_gradients_are_those_of_the_formula(self, pattern: str, kv_heads: int, size: int) -> None:
        settings = dict(PATTERNS[pattern])
        segments = torch.tensor(SEGMENTS) if settings.pop("segments", False) else None
        softcap = settings.pop("softcap", None)
        made = self.make()
        generator = torch.Generator().manual_seed(0)
        q, k, v, cotangent = (torch.randn(2, heads, LENGTH, size, generator=generator) for heads in (4, kv_heads, kv_heads, 4))
        seen = Pattern(LENGTH, segments_BL=segments, **settings)
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        if pattern not in self.patterns:
            with pytest.raises(UserError):
                made.attend(*given, made.plan(seen, torch.device("cpu")), scale=size**-0.5, softcap=softcap)
            return
        out = made.attend(*given, made.plan(seen, torch.device("cpu")), scale=size**-0.5, softcap=softcap)
        assert out.shape == q.shape and out.dtype == q.dtype
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        expected = formula(wide[0], wide[1], wide[2], seen.seen(torch.device("cpu")), size**-0.5, softcap)
        rows = torch.ones(2, 1, LENGTH, 1, dtype=torch.bool) if segments is None else (segments > 0)[:, None, :, None]
        out, expected, cotangent = (x.where(rows, torch.zeros((), dtype=x.dtype)) for x in (out, expected, cotangent))
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=self.tolerance)
        found = torch.autograd.grad(out, given, cotangent)
        for one, other in zip(found, torch.autograd.grad(expected, wide, cotangent.double()), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=0, atol=10 * self.tolerance)

    def test_a_model_with_it_sees_no_future(self) -> None:
        model = with_values(small_llama(self.make())).eval()
        before = ids()
        after = before.clone()
        after[:, 9:] = (after[:, 9:] + 1) % 64
        with torch.no_grad():
            one, other = model(before), model(after)
        torch.testing.assert_close(one[:, :9], other[:, :9], rtol=0, atol=1e-5)
        assert not torch.allclose(one[:, 9:], other[:, 9:])


def formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None) -> Tensor:
    """``softmax(c · tanh(scale · q kᵀ / c)) v`` of tensors ``[B, heads, L, H]``, over what ``seen`` is True for."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0) @ v
