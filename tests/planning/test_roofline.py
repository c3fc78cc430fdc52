"""What a step costs, against sums by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fw.meter.account import Block, History
from fw.meter.devices import find
from fw.planning import plan as planning
from fw.planning.roofline import Exchange, Work, peak, step_time

H100 = find("h100-80gb")
ROUND = replace(
    H100,
    peak_flops={"float32": 1e12, "bfloat16": 4e12},
    memory_bandwidth=1e9,
    link_bandwidth=1e8,
    network_bandwidth=1e7,
    host_bandwidth=1e6,
)


def test_a_steps_flops_are_those_of_its_products(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 for each weight that multiplies and each token; attention's for each head: 4 · L² · H forward, 10 backward, half of it causal."""
    traces = []
    monkeypatch.setattr(planning, "slowest_step", lambda trace, *rest: traces.append(trace) or 1.0)
    planning.plan(
        "tiny.yaml",
        "data={name: synthetic, vocab_size: 300, samples: 64}",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "precision=bf16",
        device="h100-80gb",
    )
    flops = sum(cost.flops for _, cost in traces[0].histories[-1].costs)
    width, inner, layers, heads, keys, size, vocabulary, batch, length = 64, 128, 2, 4, 2, 16, 300, 4, 64
    per_layer = width * (heads + 2 * keys) * size + heads * size * width + 3 * width * inner
    weights = layers * per_layer + width * vocabulary
    assert flops == 6 * weights * batch * length + layers * batch * heads * (4 + 10) * length**2 * size // 2


def test_an_operator_takes_as_long_as_its_slower_half() -> None:
    history = History()
    history.mark("forward")
    history.costs.append((0, Work(8 * 10**12, "bfloat16", 10)))  # 2 s of products
    history.costs.append((0, Work(10, "float32", 3 * 10**9)))  # 3 s of memory
    history.costs.append((0, Work(0, "float32", 10**6, "copy")))  # 1 s over PCIe
    assert step_time(history, ROUND, 8, [1]) == pytest.approx(6)


def test_what_is_beside_computation_counts_where_it_is_longer() -> None:
    history = History()
    within, across = (0, 1), (0, 8)
    history.mark("forward")
    history.costs += [(0, Work(0, "float32", 10**9)), (0, Exchange(3e8, within, True))]  # 1 s beside 3 s
    history.came(Block(1))
    history.mark("backward")
    history.costs += [(1, Work(0, "float32", 10**9)), (1, Exchange(5e6, across, True))]  # 1 s beside half a second
    history.costs += [(1, Exchange(1e8, within, False))]  # 1 s more
    history.came(Block(1))
    history.mark("step")
    history.costs += [(2, Work(0, "float32", 7 * 10**9))]
    assert step_time(history, ROUND, 8, [1]) == pytest.approx(3 + 2 + 7)
    assert step_time(history, ROUND, 8, [4]) == pytest.approx(4 * (3 + 2) + 7), "four micro-batches like this one"


def test_groups_on_several_hosts_send_side_by_side() -> None:
    history = History()
    history.costs += [(0, Exchange(1e8, tuple(range(16)), False))]
    assert step_time(history, ROUND, 8, []) == pytest.approx(1e8 / min(1e8, 8 * 1e7))


def test_a_dtype_without_products_is_computed_in_another() -> None:
    assert peak(find("v100-32gb"), "bfloat16") == 15.7e12
    assert peak(find("a100-80gb"), "float8") == 312e12
    assert peak(find("a100-80gb"), "float32") == 19.5e12
