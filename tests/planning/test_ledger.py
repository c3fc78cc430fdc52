"""Allocations of tensors without bytes, against those of the same program with bytes by the allocator's own events."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fw.checkpointing.placement import local_part
from fw.meter.account import Rules
from fw.meter.allocations import allocations
from fw.planning.ledger import Ledger

CPU = torch.device("cpu")


def plain():
    x = torch.randn(64, 256, requires_grad=True)
    w = torch.randn(512, 256, requires_grad=True)
    F.linear(x, w).relu().sum().backward()


def used_twice():
    """A sum of gradients that takes no memory where nobody else has one of them, and does where both are seen elsewhere."""
    x = torch.randn(256, 256, requires_grad=True)
    y = x * 2
    w = torch.randn(256, 256, requires_grad=True)
    (F.linear(y, w) + y.tanh() * F.linear(y, w) + y).sum().backward()


def seen_elsewhere():
    kept = []
    x = torch.randn(256, 256, requires_grad=True)
    y = x * 3
    y.register_hook(kept.append)
    (y.exp() + y.sin()).sum().backward()
    return kept


def accumulated():
    w = torch.randn(300, 300, requires_grad=True)
    for _ in range(3):
        (w * w).sum().backward()


def recomputed():
    linears = [nn.Linear(128, 128) for _ in range(3)]
    x = torch.randn(32, 128, requires_grad=True)
    for linear in linears:
        x = checkpoint(lambda y, linear=linear: F.silu(linear(y)) * y, x, use_reentrant=False)
    x.sum().backward()


def autocast():
    linear = nn.Linear(256, 512)
    x = torch.randn(64, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(linear(x).float(), torch.zeros(64, dtype=torch.int64))
    loss.backward()


def optimized():
    linear = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(linear.parameters(), fused=True)
    for _ in range(2):
        linear(torch.randn(8, 256)).square().sum().backward()
        nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def resized():
    x = torch.randn(1000, 100)
    kept = x.untyped_storage()
    kept.resize_(0)
    y = torch.randn(500, 100)
    kept.resize_(400_000)
    return x, y


PROGRAMS = [plain, used_twice, seen_elsewhere, accumulated, recomputed, autocast, optimized, resized]


def traced(program):
    with Ledger() as ledger, ledger.recording(CPU, Rules()) as found:
        found.mark("begin")
        result = program()
        del result
    return found.history.account().peak_bytes


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_peak_is_the_allocators(program):
    program()  # whatever the first use of anything keeps
    with allocations(CPU) as real:
        program()
    # Generators draw from a state that is no tensor; what else differs are numbers of a few bytes that an operator makes for itself.
    assert traced(program) == pytest.approx(real.peak_bytes, abs=64)
    assert real.peak_bytes > 50_000


def test_what_is_freed_is_gone():
    with Ledger() as ledger:
        before = ledger.live_bytes
        x = torch.empty(1000)
        y = x.view(10, 100)
        assert ledger.live_bytes == before + 4000, "a view takes nothing"
        del x
        assert ledger.live_bytes == before + 4000
        del y
        assert ledger.live_bytes == before


def test_values_are_those_of_a_step_that_goes_well():
    with Ledger():
        x = torch.randn(3)
        assert bool(x.sum().isfinite()) and float(x[0]) == 1.0
        bad = torch.zeros(1)
        bad += x.isnan().logical_or(x.isinf()).float().max()
        assert not bad.item(), "no flag is raised"
        norm = x.norm()
        assert not (~torch.isfinite(norm) | (norm < 0)).any(), "nor is this one"
        count = torch.zeros((), dtype=torch.int64)
        assert int(count) == 0
        count += 1
        assert int(count) == 1
        assert int(torch.tensor(7)) == 7


def test_modules_convert_their_parameters():
    with Ledger() as ledger:
        linear = nn.Linear(100, 100, bias=False)
        before = ledger.live_bytes
        weight = linear.weight
        linear.to(torch.bfloat16)
        assert linear.weight is weight and weight.dtype == torch.bfloat16
        assert ledger.live_bytes == before - 20_000


def test_modules_made_before_are_converted_on_the_meta_device():
    with torch.device("meta"):
        linear = nn.Linear(100, 100, bias=False)
    weight = linear.weight
    with Ledger() as ledger:
        linear.to(torch.bfloat16)
        assert linear.weight is weight and type(weight) is nn.Parameter and weight.dtype == torch.bfloat16 and weight.is_meta
        linear.to_empty(device="cpu")
        assert linear.weight.dtype == torch.bfloat16 and ledger.live_bytes == 20_000


@pytest.mark.parametrize("rank, part", [(0, slice(0, 3)), (1, slice(3, 5))])
def test_parts_stand_where_they_do(rank: int, part: slice):
    """And not at 1, as numbers that nobody computes would say."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        with Ledger():
            tensor = DTensor.from_local(torch.empty(part.stop - part.start, 4), mesh, [Shard(0)], shape=(5, 4), stride=(4, 1))
            assert local_part(tensor)[1] == (part, slice(0, 4))
    finally:
        dist.destroy_process_group()


def test_everything_is_as_it_was_afterwards():
    resize, state = torch.UntypedStorage.resize_, torch.get_rng_state
    before = torch.get_rng_state()
    with Ledger():
        torch.randn(5)
        torch.manual_seed(7)
    assert torch.UntypedStorage.resize_ is resize and torch.get_rng_state is state
    assert type(torch.randn(2)) is torch.Tensor
    assert before.numel() == torch.get_rng_state().numel()
