"""Norms, rotation and gates in one pass, against the same layers in torch's operators in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fw.kernels import elementwise
from fw_models.layers import RMSNorm, Rope, ShiftedRMSNorm
from fw_models.layers.rope import rotate

HALF_A_STEP = 2**-8
"""Of bfloat16, beside the value."""

pytestmark = pytest.mark.skipif(not elementwise._SILU_MUL.available, reason="no compiler")


@pytest.mark.parametrize("shape", [(1, 1, 64), (1, 7, 48), (1, 100, 1024)])
@pytest.mark.parametrize("kind", [RMSNorm, ShiftedRMSNorm])
def test_norms(shape, kind):
    torch.manual_seed(0)
    norm = kind(shape[-1], 1e-5).bfloat16().requires_grad_(False)
    norm.weight.normal_(1.0, 0.3)
    x = (3 * torch.randn(shape)).bfloat16()
    with torch.inference_mode():
        found = norm(x)
    wide, weight = x.double(), norm.weight.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + 1 if kind is ShiftedRMSNorm else weight)
    torch.testing.assert_close(found.double(), expected, rtol=2.01 * HALF_A_STEP, atol=1e-6)
    assert (found - norm(x)).abs().max() <= 2 * HALF_A_STEP * found.abs().max(), "nearly what training computes"


@pytest.mark.parametrize("heads, dim", [(1, 64), (4, 20), (6, 128)])
def test_rotation(heads, dim):
    torch.manual_seed(0)
    x_1TNH = torch.randn(1, 9, heads, dim).bfloat16()
    angles = Rope(dim, 10000.0).angles(torch.tensor([[3, 4, 5, 0, 1, 2, 900, 901, 7]]))
    with torch.inference_mode():
        found = rotate(x_1TNH.transpose(1, 2), angles)
    expected = rotate(x_1TNH.transpose(1, 2).double(), tuple(each.double() for each in angles))
    torch.testing.assert_close(found.double(), expected, rtol=HALF_A_STEP, atol=1e-5)
    assert found.shape == (1, heads, 9, dim) and found.transpose(1, 2).is_contiguous()


def test_gates():
    gate = torch.cat([torch.linspace(-120, 120, 4001), torch.linspace(-1e-3, 1e-3, 70)]).bfloat16()
    up = torch.randn(len(gate), generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        found = elementwise.silu_mul(gate, up)
    torch.testing.assert_close(found.double(), F.silu(gate.double()) * up.double(), rtol=1.01 * HALF_A_STEP, atol=1e-30)


def test_where_they_do_not_apply():
    x, w = torch.ones(2, 32).bfloat16(), torch.ones(32).bfloat16()
    assert elementwise.rms_norm(x, w, 1e-5) is None and elementwise.silu_mul(x, x) is None, "training has a backward"
    with torch.inference_mode():
        assert elementwise.rms_norm(x.float(), w, 1e-5) is None
        assert elementwise.rms_norm(torch.ones(2, 33).bfloat16(), torch.ones(33).bfloat16(), 1e-5) is None
        assert elementwise.silu_mul(x.t(), x.t()) is None and elementwise.silu_mul(x, w) is None
        assert elementwise.rotate(torch.ones(2, 4, 3, 8).bfloat16(), torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8)) is None
        assert elementwise.silu_mul(x.to("meta"), x.to("meta")) is None
