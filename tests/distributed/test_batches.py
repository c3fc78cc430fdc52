"""Documents of varying length: however micro-batches are cut and ranks divide the work, the losses are the same, also after a resume."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from conftest import TINY, column, environment, fw, metrics, own_cache
from distributed.ranks import run_ranks
from fw.config import load
from fw.errors import UserError
from fw.recipe import World, resolve
from fw.training import resume
from fw.training.batches import arrange

STEPS = 9
"""Of 8 samples: more than an epoch."""
TOKENS = ["train.micro_batch_size=null", "train.max_tokens_per_batch=450"]
WAYS = {
    "padded": [],
    "tokens": TOKENS,
    "bucketed": ["train.length_bucketing=3", *TOKENS],
    "packed": ["train.packing=true"],
    "packed-tokens": ["train.packing=true", *TOKENS],
    "fixed": ["data.samples=stream"],
    "fixed-tokens": ["data.samples=stream", *TOKENS],
}
SHARDINGS = {
    "ddp": ["sharding=ddp"],
    "fsdp": ["sharding=fsdp"],
    "zero2": ["sharding={name: zero, stage: 2}"],
    "tensor": ["sharding={name: fsdp, tensor: 2}"],
    "context": ["sharding={name: fsdp, context: 2}"],
}
PAIRS = [(s, way) for s in SHARDINGS for way in WAYS if s != "tensor" or "fixed" not in way]  # which test_matrix.py has
REFERENCE = {"tokens": "padded", "packed-tokens": "packed", "fixed-tokens": "fixed"}
RESUMED = ["bucketed", "packed-tokens"]
AT_4 = "checkpoints/step-00000004"


def words(name: str, *more: str) -> list[str]:
    short = [f"train.max_steps={STEPS}", "train.save_every=4", "train.val_every=4", "train.sequence_length=200", "launch.threads=1"]
    return ["data.samples=documents", "data.files=[docs/*.txt]", *short, *more, f"train.run_dir={name}"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One launch of one rank, one of two, one of one; all tests look at what these have left."""
    directory = tmp_path_factory.mktemp("batches")
    chance = random.Random(0)
    (directory / "docs").mkdir()
    for number in range(60):
        length = 460 if number == 7 else chance.randint(3, 30) if number % 3 else chance.randint(31, 150)
        (directory / f"docs/{number:02}.txt").write_text("".join(chance.choices("abcdefgh ", k=length)))
    (directory / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    one = [words(f"one-{way}", *options) for way, options in WAYS.items()]
    one += [words(f"one-{way}-again", *WAYS[way], f"resume=one-{way}/{AT_4}") for way in RESUMED]
    one += [words("one-workers", *WAYS["bucketed"], "loader.workers=2")]
    run_ranks("train_in_turn.py", 1, one, directory)
    shardings = {name: s for name, s in SHARDINGS.items() if name != "zero2" or _has_deepspeed()}
    two = [words(f"{s}-{way}", *shardings[s], *WAYS[way]) for s, way in PAIRS if s in shardings]
    two += [words(f"fsdp-{way}-again", *SHARDINGS["fsdp"], *WAYS[way], f"resume=fsdp-{way}/{AT_4}") for way in RESUMED]
    two += [words(f"fsdp-{way}-from-one", *SHARDINGS["fsdp"], *WAYS[way], f"resume=one-{way}/{AT_4}") for way in RESUMED]
    run_ranks("train_in_turn.py", 2, two, directory)
    back = [words(f"one-{way}-from-two", *WAYS[way], f"resume=fsdp-{way}/{AT_4}") for way in RESUMED]
    run_ranks("train_in_turn.py", 1, back, directory)
    return directory


def _has_deepspeed() -> bool:
    try:
        import deepspeed  # noqa: F401
    except ImportError:
        return False
    return True


def assert_same(one: Path, other: Path, last: int = STEPS) -> None:
    assert column(one, "step") == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert column(other, key) == pytest.approx(column(one, key)[-last:], rel=1e-5), (other.name, key)
    assert column(other, "tokens") == column(one, "tokens")[-last:]
    validated = [row["val_loss"] for row in metrics(other) if row["val_loss"]]
    assert validated and validated == pytest.approx(
        [row["val_loss"] for row in metrics(one) if row["val_loss"]][-len(validated) :], rel=1e-5
    )


@pytest.mark.parametrize("way", REFERENCE)
def test_tokens_instead_of_sequences_change_nothing(trained, way):
    assert_same(trained / f"one-{REFERENCE[way]}", trained / f"one-{way}")


@pytest.mark.parametrize(("sharding", "way"), PAIRS)
def test_two_ranks_equal_one(trained, sharding, way):
    if sharding == "zero2":
        pytest.importorskip("deepspeed")
    assert_same(trained / f"one-{way}", trained / f"{sharding}-{way}")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_number_of_micro_batches_varies(trained, monkeypatch, ranks):
    """Without which the others would test less than they say."""
    monkeypatch.chdir(trained)
    monkeypatch.setenv("FW_CACHE", own_cache(trained / "cache"))
    recipe = resolve(load("tiny.yaml", words("new", *TOKENS, "sharding=fsdp")), World(ranks, 0, 0, ranks, launched=True))
    recipe.data.prepare(print)
    plans = arrange(recipe, recipe.data.open(200), print).train_plans(0, 0)
    assert len({len(plan.micro_batches) for plan in islice(plans, STEPS)}) > 1


def test_ways_differ_where_they_should(trained):
    """Steps hold other samples where they are sorted or packed; the first validation sees the same documents and the same targets."""
    losses = {way: column(trained / f"one-{way}", "loss") for way in ("padded", "bucketed", "packed", "fixed")}
    assert len({tuple(each) for each in losses.values()}) == 4
    tokens = {way: column(trained / f"one-{way}", "tokens") for way in WAYS}
    assert tokens["fixed"] == [8 * 200 * step for step in range(1, STEPS + 1)]
    assert tokens["padded"][-1] < tokens["packed"][-1] <= tokens["fixed"][-1]


@pytest.mark.parametrize("way", RESUMED)
@pytest.mark.parametrize("ranks", ["one", "fsdp"])
def test_a_resumed_run_goes_on_bit_by_bit(trained, ranks, way):
    for key in ("loss", "grad_norm", "tokens"):
        assert column(trained / f"{ranks}-{way}-again", key) == column(trained / f"{ranks}-{way}", key)[4:]


@pytest.mark.parametrize("way", RESUMED)
@pytest.mark.parametrize("run", ["fsdp-{}-from-one", "one-{}-from-two"])
def test_a_resumed_run_goes_on_with_other_ranks(trained, run, way):
    assert_same(trained / f"one-{way}", trained / run.format(way), STEPS - 4)


def test_workers_change_nothing(trained):
    for key in ("loss", "grad_norm", "tokens", "val_loss"):
        assert column(trained / "one-workers", key) == column(trained / "one-bucketed", key)


@pytest.mark.parametrize(
    ("run", "option", "says"),
    [
        ("bucketed", "train.length_bucketing=2", "train.length_bucketing=3, the config says 2, which would change the order of the data"),
        (
            "bucketed",
            "train.global_batch_size=4",
            "train.global_batch_size=8, the config says 4, which would change which samples change places",
        ),
        ("packed", "train.packing=false", "train.packing=True, the config says False, which would change which samples share a row"),
    ],
)
def test_a_resumed_run_must_order_and_pack_as_before(trained, run, option, says):
    env = {**environment(), "FW_CACHE": own_cache(trained / "cache")}
    done = fw("train", "tiny.yaml", *words("new", *WAYS[run]), option, f"resume=one-{run}", cwd=trained, env=env)
    assert done.code == 2 and f"was trained with {says}" in done.err
    assert not (trained / "new").exists()


def test_a_checkpoint_from_before_there_was_packing_is_one_without(trained, monkeypatch):
    monkeypatch.chdir(trained)
    for way, agrees in (("padded", True), ("bucketed", False), ("packed", False)):
        recipe = resolve(load("tiny.yaml", words("new", *WAYS[way])))
        kept = {setting: value for setting, (value, _) in resume.must_agree(recipe).items()}
        before = {setting: value for setting, value in kept.items() if setting not in ("train.packing", "train.length_bucketing")}
        state = {"step": 1, "tokens": 1, "loader": {}, "data": "same", "must_agree": before, "scalars": {}}
        reader = SimpleNamespace(state=lambda state=state: state, place="there")
        with nullcontext() if agrees else pytest.raises(UserError, match=r"was trained with train\.\w+=(0|False), the config says"):
            resume._check_continues(recipe, SimpleNamespace(fingerprint="same", train=range(1), val=range(1)), reader)
