"""Updates that are traced once for parameters that are alike, against each traced by itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fw import config as configuration
from fw.api import update_alone
from fw.meter.account import Rules
from fw.meter.devices import find
from fw.planned import PlannedGPU, planning_for
from fw.planning.ledger import Ledger
from fw.planning.on_gpu import on_gpu, slowest_step
from fw.planning.plan import largest_step
from fw.planning.trace import RankTrace, trace_blocks
from fw.planning.updates import Updates
from fw.recipe import current_world, resolve
from fw.training.inputs import open_data, say
from fw_plugins.optimizer.eight_bit import EightBit
from fw_plugins.optimizer.per_parameter import PerParameter

MODEL = [
    "model={name: llama, num_hidden_layers: 3, hidden_size: 64, intermediate_size: 128, num_attention_heads: 4, num_key_value_heads: 2}",
    "data={name: synthetic, vocab_size: 300, samples: 64}",
    "train.global_batch_size=8",
]
DIVIDED = ["sharding=fsdp", "launch.devices=2", "train.micro_batch_size=1"]
CASES = {
    **{name: [f"optimizer={name}"] for name in ("adamw_8bit", "lion_8bit", "adamw_bf16", "lion", "lamb", "adafactor", "muon")},
    "muon, bf16, two ranks": ["optimizer=muon", "precision=bf16", *DIVIDED],
    "adamw_8bit, bf16_true, two ranks": ["optimizer=adamw_8bit", "precision=bf16_true", *DIVIDED],
    "updated in backward": ["optimizer={name: adamw_8bit, in_backward: true}", "train.gradient_clip_norm=0"],
    "paged": ["optimizer=paged_adamw_8bit"],
}


@pytest.mark.parametrize(
    ("case", "gpu"),
    [
        *((case, False) for case in CASES if case != "paged"),
        ("paged", True),
        ("adamw_8bit, bf16_true, two ranks", True),
        ("muon, bf16, two ranks", True),
    ],
)
def test_one_stands_for_those_that_are_alike(workspace: Path, monkeypatch: pytest.MonkeyPatch, case: str, gpu: bool) -> None:
    device = find("a100-80gb") if gpu else None
    once = _trace(CASES[case], device)
    monkeypatch.setattr(Updates, "stand_in", lambda *given: False)
    each = _trace(CASES[case], device)
    assert once.steps == each.steps
    for one, other in zip(once.histories, each.histories, strict=True):
        assert _plain(one) == _plain(other)
    if device is not None:
        assert on_gpu(0, once, device, 0) == on_gpu(0, each, device, 0)
        assert slowest_step(once, device, 8) == pytest.approx(slowest_step(each, device, 8), rel=1e-12)


def test_it_is_done_once_for_each_shape(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: Counter[tuple[int, ...]] = Counter()
    original = EightBit.update

    def update(self: EightBit, parameter: Tensor, *rest: Any) -> None:
        done[tuple(parameter.shape)] += 1
        original(self, parameter, *rest)

    monkeypatch.setattr(EightBit, "update", update)
    traced = _trace(CASES["adamw_8bit"], None)
    # Three blocks have as many of each. A step does each once; of embedding and head one decays and the other does not.
    steps = len(traced.histories)
    assert done == dict.fromkeys([(64, 64), (32, 64), (128, 64), (64, 128), (64,)], steps) | {(300, 64): 2 * steps}


class _Keeping(PerParameter):
    """Has more state after each step: a plan may not take one parameter's for another's."""

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        return {}

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        state[f"kept_{len(state)}"] = grad.clone()


def test_updates_that_keep_memory_are_all_done() -> None:
    weights = _weights()
    with Ledger() as ledger:
        optimizer = _Keeping(weights, {})
        with ledger.recording(torch.device("cpu"), Rules()) as found:
            optimizer.step()
        assert all(len(optimizer.state[weight]) == 1 for weight in weights)
        assert sum(block.nbytes for block in found.history.left) == sum(4 * weight.numel() for weight in weights)


def _takes(factor: int) -> Any:
    return lambda parameter, grad, state, group: parameter.new_empty(factor * parameter.numel())


class _Two:
    """Updates some parameters otherwise than others."""

    def small(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        parameter.new_empty(parameter.numel())

    def large(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        parameter.new_empty(100 * parameter.numel())

    def by_state(self, parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        kept = state["kept"]
        parameter.new_empty((kept if isinstance(kept, int) else len(kept)) * parameter.numel())


@pytest.mark.parametrize(
    "updates",
    [
        [(_takes(1), {}), (_takes(100), {})],
        [(_Two().small, {}), (_Two().large, {})],
        [(_Two().by_state, {"kept": 1}), (_Two().by_state, {"kept": 100})],
        [(_Two().by_state, {"kept": [torch.ones(1)]}), (_Two().by_state, {"kept": [torch.ones(1)] * 100})],
    ],
    ids=["functions", "methods", "numbers as state", "lists as state"],
)
def test_what_differs_in_more_than_shapes_is_done(updates: list[tuple[Any, dict[str, Any]]]) -> None:
    weights = _weights()
    with Ledger() as ledger, ledger.recording(torch.device("cpu"), Rules()) as found:
        for weight, (update, state) in zip(weights, updates, strict=False):
            assert weight.grad is not None
            update_alone(update, weight, weight.grad, state, {})
    assert found.history.account().peak_bytes - sum(block.nbytes for block in found.history.before) == 100 * 32 * 4


def _weights() -> list[Tensor]:
    """With gradients, all alike."""
    weights = [torch.zeros(8, 4).requires_grad_() for _ in range(3)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    return weights


def test_where_nothing_is_planned_all_are_done() -> None:
    seen: list[int] = []
    for number in range(3):
        update_alone(lambda p, g, s, group: seen.append(group["number"]), torch.ones(2), torch.ones(2), {}, {"number": number})
    assert seen == [0, 1, 2]


def _trace(overrides: list[str], device: Any) -> RankTrace:
    recipe = resolve(configuration.load("tiny.yaml", [*MODEL, *overrides]), current_world(), starts=False)
    _, batches, vocab_size = open_data(recipe, say)
    given = recipe, 0, vocab_size, batches.rows, largest_step(batches)
    if device is None:
        return trace_blocks(*given, whole=True)
    with planning_for(PlannedGPU(device.name, device.compute_capability, lambda tensor: False)):
        return trace_blocks(*given, device, whole=True)


def _plain(history: Any) -> list[tuple[Any, ...]]:
    """Its changes and costs, without which block is which."""
    changes = [(block.nbytes, block.category, block.site, block.stream, sign) for block, sign in history.changes]
    return [*changes, *((index, repr(cost)) for index, cost in history.costs)]
