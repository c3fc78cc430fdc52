"""Attention planned for GPUs, against what torch's sources allocate, worked out by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fw.meter.account import Rules
from fw.meter.devices import find
from fw.planning.cuda_attention import choose
from fw.planning.cuda_autocast import autocast_as_on_gpu
from fw.planning.ledger import Ledger

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
VOLTA, TURING, AMPERE, ADA, HOPPER = (7, 0), (7, 5), (8, 0), (8, 9), (9, 0)


def tensors(dtype, heads=8, keys=8, size=64, length=128, batch=2, **options):
    return [torch.empty(batch, n, length, size, dtype=dtype, **options) for n in (heads, keys, keys)]


@pytest.mark.parametrize(
    "kernel, capability, dtype, shapes, options",
    [
        ("flash", AMPERE, BF16, {}, {}),
        ("flash", ADA, FP16, {"keys": 2}, {"grouped": True}),
        ("flash", AMPERE, BF16, {"size": 20}, {}),  # padded to 24 before the kernel
        ("cudnn", HOPPER, BF16, {"keys": 2}, {"grouped": True}),
        ("cudnn", HOPPER, BF16, {}, {"mask": torch.ones(128, 128, dtype=torch.bool)}),
        ("flash", HOPPER, BF16, {"size": 256}, {}),  # too wide for cuDNN
        ("efficient", AMPERE, BF16, {}, {"mask": torch.ones(128, 128, dtype=torch.bool)}),
        ("efficient", HOPPER, FP32, {}, {}),
        ("efficient", VOLTA, FP16, {}, {}),
        ("efficient", TURING, FP32, {}, {}),
        ("math", VOLTA, BF16, {}, {}),  # its tensor cores do not know bfloat16
        ("math", AMPERE, BF16, {"size": 20}, {"mask": torch.ones(128, 128, dtype=torch.bool)}),
        ("math", AMPERE, torch.float64, {}, {}),
        ("flash", AMPERE, BF16, {"size": 208, "requires_grad": True}, {}),
        ("efficient", ADA, BF16, {"size": 208, "requires_grad": True}, {}),  # flash has no backward for it there
    ],
)
def test_the_kernel_is_that_of_sdp_utils(kernel, capability, dtype, shapes, options):
    assert choose(capability, *tensors(dtype, **shapes), causal="mask" not in options, **options) == kernel


def run(device, dtype, backward, **shapes):
    """Bytes that a forward leaves, and the peak of a backward beyond that."""
    with Ledger(find(device)) as ledger:
        q, k, v = tensors(dtype, **shapes, requires_grad=True)
        before = ledger.live_bytes
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        left = ledger.live_bytes - before
        with ledger.recording(CPU, Rules()) as found:
            if backward:
                torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    start = sum(block.nbytes for block in found.history.before)
    return left, found.history.account().peak_bytes - start


def test_what_flash_takes():
    batch, heads, keys, length, size = 2, 8, 2, 100, 64
    left, peak = run("a100-80gb", BF16, True, keys=keys, length=length)
    result, seeds = 2 * batch * heads * length * size, 16 + 8
    assert left == result + 4 * batch * heads * length + seeds, "the result, its logarithms of sums, the state of the generator"
    gradients = result + 2 * 2 * batch * keys * length * size
    rows = 128  # 100 rounded up
    apart = 4 * batch * heads * rows + 4 * batch * rows * heads * size  # sums of softmax, the gradient of queries in fp32
    per_query_head = 2 * 2 * batch * heads * length * size
    layout = 2 * result  # this gradient and result have heads before positions: the kernel's copies
    assert peak == result + gradients + apart + per_query_head + layout


def test_what_the_memory_efficient_kernel_takes():
    batch, heads, length, size = 2, 8, 100, 64
    left, peak = run("rtx2080ti", FP32, True, length=length)
    result = 4 * batch * heads * length * size
    assert left == result + 4 * batch * heads * 128 + 8 + 8, "logarithms for rows in multiples of 32"
    assert peak == pytest.approx(result + 3 * result + result + 4 * batch * heads * length, abs=2 * result), "products and their sums"


def test_scores_are_written_where_no_kernel_takes_the_tensors():
    left, _ = run("v100-32gb", BF16, False, length=256)
    assert left >= 4 * 2 * 8 * 256 * 256, "fp32"
    grouped, _ = run("h200", FP32, False, keys=2, length=256)  # torch 2.13 has a kernel for groups of halves only
    assert (grouped >= 4 * 2 * 8 * 256 * 256) == (torch.__version__ < "2.14")


def test_torch_is_as_before_afterwards():
    original = F.scaled_dot_product_attention
    with Ledger(find("h200")):
        assert F.scaled_dot_product_attention is not original
    assert F.scaled_dot_product_attention is original
    with torch.autocast("cpu", dtype=BF16):
        assert torch.ones(2, dtype=BF16).softmax(0).dtype == BF16


def test_autocast_is_that_of_cuda():
    x = torch.randn(4, 8, dtype=BF16)
    with autocast_as_on_gpu(), torch.autocast("cpu", dtype=BF16):
        for made in (F.layer_norm(x, (8,)), x.softmax(-1), x.pow(3), x.exp(), x.sum(-1), x.cumsum(0), torch.linalg.vector_norm(x)):
            assert made.dtype == FP32  # https://docs.pytorch.org/docs/stable/amp.html, ops that autocast to float32
        assert F.linear(x.float(), x.float()).dtype == F.gelu(x).dtype == x.sum(dtype=BF16).dtype == BF16
