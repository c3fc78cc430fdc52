"""Where a step's time goes: by events written by hand, and by what torch itself counts of a real step."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from fw.meter.intervals import length, union, without
from fw.meter.operators import STEP, Call, Copies, StepTrace, calls_of, step_trace

MS = 1_000_000


def call(name: str, begin: float, end: float, **more) -> Call:
    return Call(name, int(begin * MS), int(end * MS), **more)


def by_name(trace: StepTrace) -> dict[str, float]:
    """Milliseconds."""
    found: dict[str, float] = {}
    for each in trace.operators:
        found[each.name] = found.get(each.name, 0.0) + each.seconds * 1e3
    return found


def test_intervals() -> None:
    assert union([(5, 7), (1, 3), (2, 4), (4, 5)]) == [(1, 7)]
    assert union([(5, 7), (1, 3)]) == [(1, 3), (5, 7)]
    assert without([(0, 10), (20, 30)], [(2, 3), (5, 22), (29, 40)]) == [(0, 2), (3, 5), (22, 29)]
    assert without([(0, 10)], []) == [(0, 10)]
    assert length([(0, 2), (3, 5)]) == 4


def test_each_moment_is_that_of_the_innermost_operator() -> None:
    trace = step_trace(
        [
            call("aten::before", 0, 9),
            call(STEP, 10, 30),
            call("aten::linear", 11, 20),
            call("aten::mm", 12, 18, shapes=[[64, 32], [32, 16]], dtypes=["float", "float"], values=[None, None]),
            call("aten::copy_", 13, 14),
            call("aten::add", 22, 23),
            call("aten::add", 23, 25),
            call("elsewhere", 11, 29, thread=2),
            call("aten::after", 31, 32),
        ]
    )
    assert by_name(trace) == pytest.approx({"aten::linear": 3, "aten::mm": 5, "aten::copy_": 1, "aten::add": 3})
    assert trace.seconds == pytest.approx(0.020) and trace.waited_seconds == 0
    assert trace.idle_seconds == pytest.approx(0.020 - 0.009 - 0.003), "what another thread does holds nobody up"
    product = next(each for each in trace.operators if each.name == "aten::mm")
    assert (product.flops, product.nbytes, product.shapes) == (2 * 64 * 32 * 16, 4 * (64 * 32 + 32 * 16), "64×32, 32×16")


def test_who_waits_while_ranks_exchange_waits_for_that() -> None:
    trace = step_trace(
        [
            call(STEP, 0, 20),
            call("c10d::allreduce_", 1, 2),
            call("gloo:all_reduce", 2, 12, thread=7),
            call("aten::mul", 3, 5),
        ]
    )
    assert trace.waited_seconds == pytest.approx(0.008), "2 to 12 without 3 to 5"
    assert trace.idle_seconds == pytest.approx(0.009)
    assert {each.name: each.kind for each in trace.operators} == {"c10d::allreduce_": "communication", "aten::mul": "operator"}


def test_a_product_inside_a_product_counts_once() -> None:
    shapes = {"shapes": [[8, 4], [4, 2]], "dtypes": ["float", "float"], "values": [None, None]}
    trace = step_trace([call(STEP, 0, 9), call("aten::mm", 1, 5, **shapes), call("aten::mm", 2, 4, **shapes)])
    assert sum(each.calls * each.flops for each in trace.operators) == 2 * 8 * 4 * 2


def test_memory_is_of_who_asked_for_it() -> None:
    def allocated(at: float, nbytes: int) -> Call:
        return call("[memory]", at, at, nbytes=nbytes)

    trace = step_trace(
        [
            call(STEP, 0, 20),
            call("aten::to", 1, 8),
            call("aten::empty_strided", 2, 3),
            allocated(2.5, 1000),
            call("aten::copy_", 4, 7),
            allocated(7.5, -1000),
            call("aten::empty", 9, 10),
            allocated(9.5, 24),
            allocated(15, 7),
        ]
    )
    assert {each.name: each.allocated_bytes for each in trace.operators if each.allocated_bytes} == {"aten::to": 1000, "aten::empty": 24}


def test_on_a_gpu_backward_is_another_threads() -> None:
    product = {"shapes": [[8, 4], [4, 2]], "dtypes": ["float", "float"], "values": [None, None]}
    trace = step_trace(
        [
            call(STEP, 0, 12),
            call("aten::linear", 1, 3, identity=1),
            call("aten::mm", 1, 2, identity=2, **product),
            call("aten::mm_backward", 4, 7, thread=5, identity=3),
            call("aten::mm", 5, 6, thread=5, identity=4, **product),
            call("gemm", 2, 4, thread=0, on_gpu=True, launched_by=2),
            call("gemm", 6, 10, thread=0, on_gpu=True, launched_by=4),
        ]
    )
    assert by_name(trace) == pytest.approx({"aten::mm": 6}) and trace.idle_seconds == pytest.approx(0.006)
    assert [(each.calls, each.flops) for each in trace.operators] == [(2, 128)]


def test_a_gpus_time_is_its_kernels() -> None:
    def kernel(name: str, begin: float, end: float, of: int, nbytes: int = 0) -> Call:
        return call(name, begin, end, thread=0, on_gpu=True, launched_by=of, nbytes=nbytes)

    trace = step_trace(
        [
            call(STEP, 0, 10),
            call("aten::linear", 1, 3, identity=1),
            call("aten::mm", 1, 2, identity=2, shapes=[[8, 4], [4, 2]], dtypes=["c10::BFloat16"] * 2, values=[None, None]),
            call("aten::item", 3, 9, identity=3),
            call("aten::_local_scalar_dense", 4, 8, identity=4),
            kernel("gemm", 2, 8, 2),
            kernel("ncclDevKernel_AllReduce", 5, 11, 99),
            kernel("Memcpy DtoH (Device -> Pageable)", 11, 12, 4, nbytes=4),
        ]
    )
    assert trace.seconds == pytest.approx(0.012), "the host is done before the GPU is"
    assert by_name(trace) == pytest.approx({"aten::mm": 6, "NCCL": 3, "copies between host and GPU": 1})
    assert trace.idle_seconds == pytest.approx(0.002)
    assert trace.copied == [Copies(to_host=True, operator="aten::item", times=1, nbytes=4)]
    assert [(each.way, each.nbytes, each.seconds) for each in trace.transfers] == [("to the host", 4, pytest.approx(0.001))]
    product = next(each for each in trace.operators if each.name == "aten::mm")
    assert (product.flops, product.dtype, product.nbytes) == (128, "bfloat16", 2 * (32 + 8))
    assert StepTrace.from_json(trace.as_json()) == trace


def test_of_a_real_step() -> None:
    """FLOPs as torch's counter has them, allocations as the allocator's events; all time accounted for."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0.0)
    x = torch.randn(2, 16, 64)

    def step() -> None:
        layer(x).square().sum().backward()

    step()
    with FlopCounterMode(display=False) as counter:
        step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as record:
        with torch.profiler.record_function("around"):
            step()
        with torch.profiler.record_function(STEP):
            step()
    results = record.profiler.kineto_results
    trace = step_trace(calls_of(results))
    attention = 2 * 2 * (4 + 10) * 16 * 16 * 32  # batch × heads × products of forward and backward; torch's counter has none on the CPU
    assert sum(each.calls * each.flops for each in trace.operators) == counter.get_total_flops() + attention
    told = sum(each.seconds for each in trace.operators) + trace.idle_seconds + trace.waited_seconds
    assert told == pytest.approx(trace.seconds, rel=1e-6)
    begin, end = next((e.start_ns(), e.end_ns()) for e in results.events() if e.name() == STEP)
    taken = sum(e.nbytes() for e in results.events() if e.name() == "[memory]" and e.nbytes() > 0 and begin <= e.start_ns() < end)
    assert 0 < sum(each.allocated_bytes for each in trace.operators) <= taken
    assert not any(each.name.startswith(("around", "autograd::", "AddmmBackward")) for each in trace.operators)
