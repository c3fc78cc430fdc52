"""A loss or gradient that is not finite: no rank updates by it, it is named, and the policy is followed on all ranks alike."""

from __future__ import annotations

import math
import re

import pytest

from conftest import column, fw, metrics, summary
from distributed.faulty import installed

TWO = ("launch.devices=2", "train.max_steps=9", "train.save_every=4", "train.log_every=1")
SHARDINGS = {
    "ddp": ["sharding=ddp"],
    "fsdp": ["sharding=fsdp"],
    "tensor": ["sharding=fsdp", "sharding.tensor=2"],
    "zero 2 bf16": ["sharding=zero", "sharding.stage=2", "precision=bf16"],
    "zero 3": ["sharding=zero", "sharding.stage=3"],
}


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    return installed(tmp_path_factory.mktemp("site"))


@pytest.fixture
def spoilt(workspace, env):
    """Runs `fw train` with an objective that goes wrong on one rank."""

    def run(how: str, steps: str, *words: str):
        return fw(
            "train", "tiny.yaml", "objective=faulty", f"objective.how={how}", f"objective.steps={steps}", *TWO, *words, env=env, timeout=200
        )

    return run


LORA = ["peft={name: lora, rank: 2}"]
ADAPTERS = {
    "adapters, fsdp": [*SHARDINGS["fsdp"], *LORA],
    "adapters, zero 3": [*SHARDINGS["zero 3"], *LORA],
    "adapters over codes, ddp": [*SHARDINGS["ddp"], *LORA, "quantization=nf4"],
}


@pytest.mark.parametrize("sharding", [*SHARDINGS, *ADAPTERS])
def test_skipping_and_rolling_back_are_the_same_on_all_ranks(spoilt, sharding):
    """Rolling back to step 4 in step 6 leaves what skipping steps 5 and 6 does."""
    words = {**SHARDINGS, **ADAPTERS}[sharding]
    done = spoilt("inf", "[6]", "train.on_nonfinite=roll_back", "train.run_dir=back", *words).ok()
    assert "step 6: loss inf, gradient norm nan; the loss is inf, of outputs that are finite on rank 1; going on from" in done.err
    assert "step-00000004\n" in done.err
    done = spoilt("inf", "[5,6]", "train.on_nonfinite=skip", "train.run_dir=skipped", *words).ok()
    assert done.err.count("; step skipped") == 2 and "not made (not finite)" in done.out
    assert summary("skipped")["skipped_steps"] == 2
    back, skipped = column("back", "loss"), column("skipped", "loss")
    assert (back[:4] == skipped[:4] and back[6:] == skipped[6:] and back[4] == skipped[4] * math.inf) or back[4] < 10
    assert skipped[4:6] == [math.inf, math.inf] and back[5] == math.inf
    straight = fw("train", "tiny.yaml", *TWO, *words, "train.run_dir=straight").ok()
    assert straight and column("straight", "loss")[:4] == back[:4] and column("straight", "loss")[6:] != back[6:]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("module", r"loss nan, gradient norm nan; the output of layers\.1\.mlp\.down_proj is the first that is not finite on rank 1"),
        (
            "gradient",
            r"loss 5\.\d+, gradient norm nan; the gradient .* layers\.1\.mlp\.down_proj\S* is the first that is not finite on rank 1",
        ),
    ],
)
@pytest.mark.parametrize("sharding", ["fsdp", "zero 3"])
def test_the_first_bad_module_is_named(spoilt, how, said, sharding):
    done = spoilt(how, "[5]", "activation=full", *SHARDINGS[sharding])
    assert done.code == 1 and re.search(said, done.err), done.err
    assert "The step was not made; resume with a lower optimizer.lr, or with train.on_nonfinite=skip or roll_back" in done.err
    assert [row["step"] for row in metrics("run")] == [1, 2, 3, 4]
    # What the run left is whole: it goes on from before.
    fw("train", "tiny.yaml", *TWO, *SHARDINGS[sharding], "resume=run", "train.run_dir=again").ok()
    assert all(map(math.isfinite, column("again", "loss")))


def test_what_is_finite_when_computed_again_goes_on_as_if_nothing_had_been(spoilt):
    done = spoilt("glitch", "[3]", "train.run_dir=glitch", "sharding=fsdp").ok()
    assert "step 3: the gradient was not finite, computed again it was" in done.err
    fw("train", "tiny.yaml", *TWO, "sharding=fsdp", "train.run_dir=straight").ok()
    assert column("glitch", "loss") == column("straight", "loss"), "what watches changes nothing"


def test_rolling_back_takes_nothing_from_another_future(spoilt):
    """What came after the checkpoint that a run goes on from is what it wants to leave behind."""
    fw("train", "tiny.yaml", *TWO, "sharding=ddp").ok()
    done = spoilt("inf", "[2]", "train.on_nonfinite=roll_back", "sharding=ddp", "resume=run/checkpoints/step-00000004").ok()
    assert re.search(r"going on from \S*run/checkpoints/step-00000004\n", done.err), done.err


def test_a_run_that_does_not_recover_ends(spoilt):
    done = spoilt("inf", "[5,6,7,8,9]", "train.on_nonfinite=skip", "train.nonfinite_limit=3", "sharding=ddp")
    assert done.code == 1 and "3 steps in a row, the most that train.nonfinite_limit allows" in done.err
    done = spoilt("inf", "[2]", "train.on_nonfinite=roll_back", "sharding=ddp")
    assert done.code == 1 and "There is no checkpoint yet to roll back to (train.save_every=4)" in done.err
