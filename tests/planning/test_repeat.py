"""Blocks that stand for others: by hand, and against traces of all blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from fw import config as configuration
from fw.meter.account import Block, History
from fw.meter.devices import find
from fw.planned import PlannedGPU, planning_for
from fw.planning.expand import Copies, NotRepeatable, Stretch, expand
from fw.planning.on_gpu import on_gpu, slowest_step
from fw.planning.plan import largest_step
from fw.planning.trace import RankTrace, trace_blocks, trace_rank
from fw.recipe import Recipe, current_world, resolve
from fw.training.inputs import open_data, say

DEEP = ["data={name: synthetic, vocab_size: 300, samples: 64}", "train.global_batch_size=8"]
LLAMA = "model={name: llama, num_hidden_layers: 12, hidden_size: 64, intermediate_size: 96, num_attention_heads: 4, num_key_value_heads: 2}"
REPEATED = {
    "one rank": [LLAMA],
    "fsdp": [LLAMA, "sharding=fsdp", "launch.devices=2", "train.micro_batch_size=1", "precision=bf16"],
    "tensor, full": [LLAMA, "sharding={name: fsdp, tensor: 2}", "launch.devices=4", "activation=full", "train.global_batch_size=16"],
    "hsdp, kept": [LLAMA, "sharding={name: fsdp, replicate: 2, reshard_after_forward: false}", "launch.devices=4"],
    "updated in backward": [LLAMA, "optimizer.in_backward=true", "train.gradient_clip_norm=0"],
    "updated in backward, fsdp": [
        *(LLAMA, "optimizer={name: adamw_8bit, in_backward: true}", "train.gradient_clip_norm=0", "train.micro_batch_size=4"),
        *("sharding=fsdp", "launch.devices=2"),
    ],
    "kept on the host": [LLAMA, "offload.activations=cpu", "precision=bf16_true"],
    "kept on the host, updated": [
        *(LLAMA, "offload.activations=cpu", "precision=bf16_true", "optimizer.in_backward=true", "train.gradient_clip_norm=0"),
    ],
    "every second": [LLAMA.replace("12", "14"), "activation={name: every_n, n: 2}", "optimizer=muon"],
    "windows": [
        "model={name: gemma3, num_hidden_layers: 19, hidden_size: 32, intermediate_size: 48, num_attention_heads: 2, sliding_window: 16,"
        f" layer_types: {['sliding_attention', 'sliding_attention', 'full_attention'] * 6 + ['sliding_attention']}}}"
    ],
}
WHOLE = {
    "few blocks": [LLAMA.replace("12", "10")],
    "ddp": [LLAMA, "sharding=ddp", "launch.devices=2"],
    "several at a time": [LLAMA, "activation=sqrt"],
    "gathered ahead": [LLAMA, "sharding={name: fsdp, forward_prefetch: 1}", "launch.devices=2"],
    # The routers' loss takes the logits of all blocks together.
    "experts": ["model={name: mixtral, num_hidden_layers: 11, hidden_size: 32, intermediate_size: 48, num_attention_heads: 2}"],
}


@pytest.mark.parametrize("case", REPEATED)
def test_few_blocks_tell_what_all_take(workspace: Path, case: str) -> None:
    few, all_ = (_trace(REPEATED[case], whole) for whole in (False, True))
    assert few.left_out > 0 and all_.left_out == 0
    assert few.loaded_bytes == all_.loaded_bytes
    assert few.steps[-1] == all_.steps[-1]


@pytest.mark.parametrize(
    "case", ["fsdp", "tensor, full", "updated in backward", "updated in backward, fsdp", "kept on the host", "kept on the host, updated"]
)
def test_on_a_gpu_they_also_take_as_long_and_reserve_as_much(workspace: Path, case: str) -> None:
    device = find("h100-80gb")
    with planning_for(PlannedGPU(device.name, device.compute_capability, lambda tensor: False)):
        recipe, *rest = _inputs(REPEATED[case])
        few, all_ = (trace_blocks(recipe, 0, *rest, device, whole=whole) for whole in (False, True))
    assert few.left_out > 0 and few.steps[-1] == all_.steps[-1]
    assert slowest_step(few, device, 8) == pytest.approx(slowest_step(all_, device, 8), rel=1e-9)
    assert on_gpu(0, few, device, 0).driver_peak == on_gpu(0, all_, device, 0).driver_peak
    assert few.host_bytes == all_.host_bytes


@pytest.mark.parametrize("case", WHOLE)
def test_where_they_do_not_all_are_traced(workspace: Path, case: str) -> None:
    recipe, *rest = _inputs(WHOLE[case])
    found = trace_rank(recipe, 0, *rest)
    assert found.left_out == 0
    whole = trace_blocks(recipe, 0, *rest, whole=True)
    assert (found.loaded_bytes, found.steps) == (whole.loaded_bytes, whole.steps)


def _trace(overrides: list[str], whole: bool) -> RankTrace:
    recipe, *rest = _inputs(overrides)
    return trace_blocks(recipe, 0, *rest, whole=whole)


def _inputs(overrides: list[str]) -> tuple[Recipe, int, object, object]:
    recipe = resolve(configuration.load("tiny.yaml", [*DEEP, *overrides]), current_world(), starts=False)
    _, batches, vocab_size = open_data(recipe, say)
    return recipe, vocab_size, batches.rows, largest_step(batches)


def test_a_history_by_hand() -> None:
    """Three blocks were run, of which the middle one stands for three: each keeps 10 for backward, and hands on 3; a gradient takes 5."""
    history, segments = _three_blocks()
    copies = Copies(2)
    whole = expand(history, segments, 1, copies, set())
    # Forward leaves 5 · 10 and the last block's 3; backward's first block adds its gradient's 5 and drops 10 and 3.
    assert history.account().peak_bytes == 3 * 10 + 3 + 5
    assert whole.account().peak_bytes == 5 * 10 + 3 + 5
    assert whole.account().most == {"kept": 50, "passed": 6, "gradient": 25}
    assert [name for _, name in whole.marks] == ["forward", "backward", "step"]
    assert [len(whole.changes[:index]) for index, _ in whole.marks] == [0, 3 * 5 - 1, len(whole.changes) - 5]
    signs = sum(sign for _, sign in whole.changes)
    assert signs == 0


def test_what_a_period_leaves_behind_is_not_repeated() -> None:
    history, segments = _three_blocks()
    leak = Block(7, "kept")
    history.changes.insert(4, (leak, 1))  # in the second block's forward
    moved = [(start + (start > 4), stretch) for start, stretch in segments]
    with pytest.raises(NotRepeatable):
        expand(history, moved, 1, Copies(2), set())


def test_what_a_period_frees_of_others_is_not_repeated() -> None:
    history, segments = _three_blocks()
    history.before.append(block := Block(7, "other"))
    history.changes.insert(4, (block, -1))
    moved = [(start + (start > 4), stretch) for start, stretch in segments]
    with pytest.raises(NotRepeatable):
        expand(history, moved, 1, Copies(2), set())


def _three_blocks() -> tuple[History, list[tuple[int, Stretch | None]]]:
    history = History()
    segments: list[tuple[int, Stretch | None]] = [(0, None)]
    kept, passed, gradients = [], [], []
    history.mark("forward")
    for number in range(3):
        segments.append((len(history.changes), Stretch(0, True, number)))
        kept.append(history.came(Block(10, "kept")))
        passed.append(history.came(Block(3, "passed")))
        if number:
            history.went(passed[number - 1])
    segments.append((len(history.changes), None))
    history.mark("backward")
    for number in reversed(range(3)):
        segments.append((len(history.changes), Stretch(1, False, number)))
        gradients.append(history.came(Block(5, "gradient")))
        history.went(kept[number])
        if number == 2:
            history.went(passed[2])
    segments.append((len(history.changes), None))
    history.mark("step")
    for gradient in gradients:
        history.went(gradient)
    return history, segments
