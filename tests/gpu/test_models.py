"""The reference models on CUDA: against the CPU, and the grouped kernel against a loop."""

from __future__ import annotations

import pytest
import torch

import fw
from fw_models.layers.grouped import grouped_linear
from models.architectures import CASES, VOCABULARY, save

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_cpu(case, tmp_path):
    save(case, tmp_path)
    ids = torch.randint(VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    segments = torch.tensor([[0] * 5 + [1] * 20 + [2] * 15] * 2)
    with torch.no_grad():
        expected = fw.load_model(tmp_path)(ids, segments_BL=segments)
        found = fw.load_model(tmp_path, device="cuda")(ids.cuda(), segments_BL=segments.cuda())
        low = fw.load_model(tmp_path, dtype=torch.bfloat16, device="cuda")(ids.cuda(), segments_BL=segments.cuda())
    torch.testing.assert_close(found.cpu(), expected, atol=2e-3, rtol=0)
    assert (low.cpu().float() - expected).abs().mean() < 0.05 * expected.abs().mean() + 0.02


@pytest.mark.parametrize("width", [64, 60])  # with and without the kernel's alignment
def test_grouped_kernel_equals_a_loop(width):
    sizes = [17, 0, 40, 1, 0, 30]
    rows = torch.randn(sum(sizes), 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(len(sizes), width, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    out = grouped_linear(rows, weight, ends)
    expected = torch.cat([part @ weight[group].T for group, part in enumerate(rows.split(sizes))])
    torch.testing.assert_close(out, expected, atol=0.2, rtol=0.05)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, (rows, weight), cotangent)
    for one, two in zip(found, torch.autograd.grad(expected, (rows, weight), cotangent), strict=True):
        torch.testing.assert_close(one, two, atol=0.5, rtol=0.05)
    assert not found[1][1].any() and not found[1][4].any()
