"""What a plan knows of DeepSpeed: who keeps which pieces, against its engine; what must not be there afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from fw import config
from fw.assemble import build, start
from fw.kinds.data import Rows
from fw.planning.alike import ranks_alike
from fw.planning.ledger import Ledger
from fw.planning.plan import plan
from fw.planning.trace import TRACED, as_rank
from fw.recipe import Recipe, resolve

pytest.importorskip("deepspeed")

SYNTHETIC = ["data={name: synthetic, vocab_size: 300, samples: 64}", "train.global_batch_size=12", "train.micro_batch_size=1"]
ODD = ["model.hidden_size=68", "model.num_attention_heads=2", "model.num_key_value_heads=1"]
CASES = {
    "stage 1": ["sharding.stage=1"],
    "stage 2 in turn": ["sharding.stage=2", "sharding.round_robin_gradients=true"],
    "stage 2 aligned": ["sharding.stage=2", "sharding.parameter_alignment=true", "precision=bf16", *ODD],
}


def zero(ranks: int, *overrides: str) -> Recipe:
    return resolve(config.load("tiny.yaml", [*SYNTHETIC, "sharding.name=zero", f"launch.devices={ranks}", *overrides]), starts=False)


@pytest.mark.parametrize("case", CASES)
def test_shares_are_what_the_engine_keeps(workspace: Path, case: str) -> None:
    recipe = zero(4, *CASES[case])
    for rank in range(4):
        with as_rank(recipe, rank) as mesh, recipe.sharding.traced(recipe.step_spec(TRACED)):
            built = build(recipe, 300, mesh, TRACED)
            share = recipe.sharding.share(built.model, recipe.mesh_shape, built.spec, rank)
            with Ledger():
                engine = start(recipe, built, mesh, TRACED, lambda tensors: None).stepper.module.optimizer
                assert share == kept(engine, rank)


def kept(engine, rank: int) -> tuple[int, ...]:
    """By the engine's own books."""
    whole, found = 0, []
    for group, parameters in enumerate(engine.params_in_partition):
        for parameter in parameters:
            number, size = engine.get_param_id(parameter), parameter.numel()
            begin = int(engine.grad_start_offset[group][rank][number])
            place = int(engine.grad_partition_insertion_offset[group][rank][number])
            whole += size
            found += [size, begin, begin + min(size - begin, int(engine.partition_size[group]) - place)]
        found.append(-1)
    return whole, *found


def test_of_many_ranks_the_next_larger_ones_stand_for_others(workspace: Path) -> None:
    recipe = zero(24, "sharding.stage=2", "train.global_batch_size=24")
    with as_rank(recipe, 0) as mesh:
        built = build(recipe, 300, mesh, TRACED)
        shares = [recipe.sharding.share(built.model, recipe.mesh_shape, built.spec, rank) for rank in range(24)]
    alike = ranks_alike(recipe, 300, Rows())
    assert len(set(shares)) > 8 >= len(set(alike))
    assert all(shares[like] >= shares[rank] for rank, like in enumerate(alike))
    assert all(alike[like] == like for like in alike), "who stands for others stands for itself"
    assert shares[alike[shares.index(max(shares))]] == max(shares)
    assert ranks_alike(zero(24, "sharding.stage=3", "train.global_batch_size=24"), 300, Rows()) == [0] * 24


def test_nothing_is_compiled_or_left_and_deepspeed_is_as_it_was(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.comm import comm
    from deepspeed.ops.adam import cpu_adam
    from deepspeed.runtime.zero import utils
    from deepspeed.utils import groups

    before = utils.get_lst_from_rank0, cpu_adam.CPUAdamBuilder
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(workspace / "extensions"))
    offload = "offload={optimizer: nvme, params: nvme, path: disk}"
    document = plan("tiny.yaml", *SYNTHETIC, "sharding={name: zero, stage: 3}", "launch.devices=2", offload)
    assert [rank.rank for rank in document.per_rank] == [0, 1]
    assert not (workspace / "extensions").exists() and not list((workspace / "disk").iterdir())
    assert (utils.get_lst_from_rank0, cpu_adam.CPUAdamBuilder) == before
    assert comm.cdb is None and groups._WORLD_GROUP is None


@pytest.mark.parametrize("peft", ["none", "{name: lora, rank: 2}"])
def test_stage_3_has_no_weight_between_a_layers_forward_and_its_backward(workspace: Path, peft: str) -> None:
    """Also where blocks recompute nothing: what they keep are activations, and weights are gathered again."""
    lean = ["sharding={name: zero, stage: 3, stage3_max_live_parameters: 1, stage3_max_reuse_distance: 0}", "launch.devices=2"]
    lean += ["activation=none", "train.sequence_length=4", "train.micro_batch_size=1", "train.global_batch_size=2", "precision=bf16"]
    lean += [
        "sharding.stage3_prefetch_bucket_size=0",
        "sharding.stage3_param_persistence_threshold=0",
        "model.hidden_size=128",
        f"peft={peft}",
    ]
    few, many = (
        plan("tiny.yaml", *SYNTHETIC[:1], *lean, f"model.num_hidden_layers={layers}").per_rank[0].most["activations"] for layers in (1, 7)
    )
    weights = 2 * 6 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 128)
    assert 0 < many - few < weights / 4
