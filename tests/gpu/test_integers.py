"""Integers by groups on a GPU: the same codes as on the CPU, products of what they stand for, and GPTQ there."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fw_plugins.quantization.coded import CodedLinear
from fw_plugins.quantization.gptq import gptq
from fw_plugins.quantization.grouped import Grouped
from plugins.test_gptq import INTO, OUT, weight_and_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("bits, group, symmetric", [(4, 32, True), (4, 80, False), (8, 160, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_what_they_stand_for_are_those_of_the_cpu(bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> None:
    layout = Grouped((OUT, INTO), bits, group, symmetric)
    weight_OI = weight_and_inputs()[0].to(dtype)
    here, there = layout.quantize(weight_OI), layout.quantize(weight_OI.cuda())
    assert all(torch.equal(there[name].cpu(), value) for name, value in here.items())
    dense = layout.dequantize(tuple(there.values()), dtype)
    assert torch.equal(dense.cpu(), layout.dequantize(tuple(here.values()), dtype))
    linear = torch.nn.Linear(INTO, OUT, bias=True, device="cuda", dtype=dtype)
    linear.__class__ = CodedLinear
    assert isinstance(linear, CodedLinear)
    linear.layout = layout
    for name, value in there.items():
        linear.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    x = torch.randn(5, INTO, device="cuda", dtype=dtype, requires_grad=True)
    linear(x).sum().backward()
    again = x.detach().clone().requires_grad_()
    expected = F.linear(again, dense, linear.bias)
    expected.sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(linear(x), expected, atol=tolerance, rtol=tolerance)
    assert x.grad is not None and again.grad is not None and torch.allclose(x.grad, again.grad, atol=tolerance, rtol=tolerance)


def test_gptq_chooses_there_what_it_chooses_here() -> None:
    weight_OI, x_TI = weight_and_inputs()
    layout, gram_II = Grouped((OUT, INTO), 4, 32, True), x_TI.t() @ x_TI
    here = layout.dequantize(tuple(gptq(weight_OI, gram_II, layout).values()), torch.float32)
    there = layout.dequantize(tuple(gptq(weight_OI.cuda(), gram_II.cuda(), layout).values()), torch.float32).cpu()
    assert (here != there).sum() <= 0.02 * here.numel(), "values halfway between two codes apart"
