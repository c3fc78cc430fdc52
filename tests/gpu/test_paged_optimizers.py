"""Optimizer state in managed memory on a GPU: where it is, that kernels and copies see one memory, and the bits of the same without."""

from __future__ import annotations

import os

import pytest
import torch

from fw.kinds.offload import OffloadPolicy
from fw_plugins.optimizer import paged
from plugins.test_paged_optimizers import PAIRS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def package():
    pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_page_is_one_memory_for_both(dtype):
    from bitsandbytes.functional import get_paged

    page = get_paged(300, 256, dtype=dtype, device=CUDA)
    seen = paged.on_device(page, CUDA)
    assert seen.device == CUDA and seen.dtype == dtype and seen.shape == (300, 256)
    values = torch.randint(100, (300, 256)).to(dtype)
    seen.copy_(values)
    torch.cuda.synchronize()
    assert torch.equal(page, values) and torch.equal(seen.cpu(), values)
    assert torch.equal(seen.float().sum(1).cpu(), values.float().sum(1))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_the_bits_of_the_same_without_pages_and_none_of_the_allocators_bytes(pair):
    results = []
    for plugin in pair:
        plugin.check("cuda", OffloadPolicy())
        spec = plugin.spec(CUDA)
        weight = torch.nn.Parameter(torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)).cuda())
        optimizer = spec.cls([weight], lr=spec.lr, weight_decay=0.1, **spec.arguments)
        generator = torch.Generator().manual_seed(1)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            weight.grad = torch.randn(1024, 2048, generator=generator).cuda()
            optimizer.step()
            weight.grad = None
        torch.cuda.synchronize()
        state = optimizer.state[weight]
        bytes_of_size = sum(t.nbytes for t in state.values() if t.nbytes >= 1 << 16)
        taken = torch.cuda.memory_allocated() - before
        assert taken < 1 << 20 if plugin is pair[0] else taken >= bytes_of_size
        assert all(t.is_cuda for t in state.values() if t.dim())
        results.append([weight.detach(), *(state[key] for key in sorted(state))])
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(*results, strict=True))


@pytest.mark.alone
@pytest.mark.skipif(
    "FW_GPU_OVERSUBSCRIBE" not in os.environ, reason="can hang a GPU that others use: set FW_GPU_OVERSUBSCRIBE=1 on one of your own"
)
def test_more_state_than_the_device_has_room_for():
    """Of 3 GiB that are left free weights take 1.5, and their two moments 3."""
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - (3 << 30), dtype=torch.uint8, device=CUDA)
    rows = (3 << 29) // (4 * 16384) // 8
    plugin = PAIRS["32bit"][0]
    spec = plugin.spec(CUDA)
    weights = [torch.nn.Parameter(torch.ones(rows, 16384, device=CUDA)) for _ in range(8)]
    optimizer = spec.cls(weights, lr=0.5, **spec.arguments)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            weight.grad = None
    assert all(torch.equal(optimizer.state[w]["exp_avg"][0, :4], optimizer.state[weights[0]]["exp_avg"][0, :4]) for w in weights)
    del ballast
    torch.cuda.empty_cache()  # or what runs next would have nothing
    assert all(float((weight - weight[0, 0]).abs().max()) == 0 and float(weight[0, 0]) < 1 for weight in weights)
