"""From config to recipe, and every way it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import TINY
from fw.config import DEFAULT, load
from fw.errors import UserError
from fw.recipe import World, current_world, resolve


@pytest.fixture
def recipe(workspace: Path):
    return lambda *overrides, world=None: resolve(load("tiny.yaml", overrides), world)


def test_defaults_fill_what_nobody_wrote(recipe):
    made = recipe()
    assert made.names["precision"] == ("fp32",) and made.names["attention"] == ("sdpa",)
    assert made.tree["optimizer"] == {
        "name": "adamw",
        "in_backward": False,
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "fused": None,
    }
    assert made.train.max_steps == TINY["train"]["max_steps"]


def test_every_value_has_an_origin(recipe):
    origins = recipe("train.seed=7", "precision=bf16").origins()
    assert str(origins["train", "seed"]) == "override train.seed=7"
    assert str(origins["precision", "name"]) == "override precision=bf16"
    assert origins["optimizer", "eps"] == DEFAULT
    lines = Path("tiny.yaml").read_text().splitlines()
    origin = origins["model", "hidden_size"]
    assert origin.source == "tiny.yaml" and "hidden_size" in lines[origin.line - 1]


def test_interpolation_reaches_defaults_and_the_environment(recipe, monkeypatch):
    monkeypatch.setenv("FW_TEST_STEPS", "12")
    made = recipe("train.max_steps=${oc.env:FW_TEST_STEPS}", "schedule.warmup_steps=${train.log_every}")
    assert made.train.max_steps == 12
    assert made.schedule.config.warmup_steps == 1  # the default of log_every


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "optimizer.learning_rate=1",
            r"override optimizer.learning_rate=1: unknown key 'learning_rate' in 'optimizer'",
        ),
        ("train.max_step=1", r"unknown key 'max_step' in 'train'; did you mean 'max_steps'\?"),
        ("modle.hidden_size=1", r"override modle.hidden_size=1: unknown section 'modle'; did you mean 'model'\?"),
        ("optimizer=adamww", r"unknown optimizer 'adamww'; did you mean 'adamw'\? \(there are: adafactor, adamw, "),
        ("train.max_steps=many", r"train.max_steps: 'many' is not of type int"),
        ("train.max_steps=1.5", r"train.max_steps: 1.5 is not of type int"),
        ("train.compile=perhaps", r"train.compile: .*perhaps.*"),
        ("train.max_steps=0", r"override train.max_steps=0: train.max_steps: 0 is too small"),
        ("7=5", r"override 7=5: unknown section '7'"),
        ("train=5", r"'train' is a section of options, not 5"),
        ("model=7", r"write 'model: NAME' or .* not 7"),
        ("data.tokenizer=word", r"data.tokenizer: 'word' is neither bpe nor byte nor a directory"),
        ("train.seed=${nowhere}", r"train.seed: .*nowhere.*not found"),
        ("memory.budget=lots", r"'lots' is not a size"),
        ("memory.budget=0GiB", r"memory.budget: 0GiB is too small"),
        ("logger=[csv,csv]", r"logger names one plugin twice"),
        ("launch.devices=2", r"sharding 'single' runs on one rank, not 2; choose sharding=ddp"),
        ("launch.nodes=2", r"launch.nodes: 2 hosts need launch.rendezvous"),
        ("model.num_key_value_heads=3", r"3 does not divide num_attention_heads 4"),
        ("resume=5", r"resume is 'auto' or the path"),
        ("train.compile=5", r"train.compile: 5 is not of type bool"),
        ("train.gradient_clip_norm=.nan", r"train.gradient_clip_norm: nan is not a finite number"),
        ("optimizer.lr=inf", r"optimizer.lr: 'inf' is not a finite number"),
        ("data.files=[[a]]", r"data.files: \[\['a'\]\] is not of type list\[str\]"),
        ("train.max_steps=${", r"train.max_steps: '\$\{' is no interpolation"),
        ("model=${nowhere}", r"model: .*nowhere.* not found"),
        ("model.num_key_value_heads=0", r"model.num_key_value_heads: 0 is too small"),
        ("model.head_dim=0", r"model.head_dim: 0 is too small"),
        ("launch.rendezvous=host:port", r"launch.rendezvous: 'host:port' is not of the form HOST:PORT"),
        ("launch.rendezvous=host:99999", r"launch.port: 99999 is no TCP port"),
        ("launch.threads=0", r"launch.threads: 0 is too small"),
        ("logger.0.a=1", r"unknown key 'a' in 'logger.0'"),
    ],
)
def test_wrong_input_is_refused_in_one_sentence(recipe, override, message):
    with pytest.raises(UserError, match=message) as caught:
        recipe(override)
    assert "\n" not in str(caught.value)


def test_steps_that_are_measured_or_traced_are_among_the_runs(recipe):
    assert recipe("train.max_steps=5", "memory.measure_step=4", "memory.trace_step=5").memory.trace_step == 5
    with pytest.raises(UserError, match=r"memory.measure_step: there is no step 6, since train.max_steps is 5"):
        recipe("train.max_steps=5", "memory.measure_step=6")
    with pytest.raises(UserError, match=r"memory.trace_step: step 3 is measured by memory.measure_step"):
        recipe("train.max_steps=5", "memory.measure_step=2", "memory.measure_steps=2", "memory.trace_step=3")


def test_text_options_get_what_was_written(recipe, workspace):
    made = recipe("train.run_dir=007", "train.sample_prompt=Hello: world")
    assert made.train.run_dir == "007" and made.train.sample_prompt == "Hello: world"
    made = recipe("train={run_dir: 007, max_steps: 3}")
    assert made.train.run_dir == "007" and made.train.max_steps == 3
    Path("text.yaml").write_text("extends: tiny.yaml\ntrain: {run_dir: 1e5, sample_prompt: on}\n")
    train = resolve(load("text.yaml")).train
    assert (train.run_dir, train.sample_prompt) == ("1e5", "on")


def test_names_and_resume_may_be_interpolated(recipe, monkeypatch):
    monkeypatch.setenv("FW_TEST_NAME", "sgd")
    made = recipe("optimizer=${oc.env:FW_TEST_NAME}", "resume=${oc.env:FW_TEST_RESUME,auto}", "schedule=constant")
    assert made.names["optimizer"] == ("sgd",) and made.resume == "auto"


def test_a_missing_extra_is_named_with_its_pip_command(recipe, monkeypatch):
    from fw.registry import inspection

    found = inspection.find_spec
    monkeypatch.setattr(inspection, "find_spec", lambda module: None if module == "wandb" else found(module))
    with pytest.raises(UserError, match=r"logger 'wandb' needs wandb, which is not installed: pip install \"fw\[wandb\]\""):
        recipe("logger=[csv, wandb]")


def test_a_typo_in_a_file_is_reported_with_its_line(workspace):
    text = Path("tiny.yaml").read_text().replace("warmup_steps", "warm_up_steps")
    Path("typo.yaml").write_text(text)
    line = next(i for i, row in enumerate(text.splitlines(), start=1) if "warm_up_steps" in row)
    with pytest.raises(UserError, match=rf"typo.yaml:{line}: unknown key 'warm_up_steps' in 'schedule'; did you mean 'warmup_steps'\?"):
        resolve(load("typo.yaml"))


def test_a_section_that_must_be_there(workspace):
    Path("nothing.yaml").write_text("train: {max_steps: 1}\n")
    with pytest.raises(
        UserError, match=r"no 'model' section, which decides architecture and size; add one, like 'model: NAME' \(there are: .*llama"
    ):
        resolve(load("nothing.yaml"))


@pytest.mark.parametrize(
    ("overrides", "ranks", "micro", "accumulation"),
    [
        ([], 1, 2, 4),
        (["sharding=ddp", "launch.devices=2"], 2, 2, 2),
        (["sharding=fsdp", "launch.devices=4"], 4, 2, 1),
        (["train.micro_batch_size=null", "sharding=fsdp", "launch.devices=4"], 4, 2, 1),
        (["train.micro_batch_size=null"], 1, 8, 1),
        (["train.micro_batch_size=null", "train.max_tokens_per_batch=255"], 1, 3, 3),
        (["train.micro_batch_size=null", "train.max_tokens_per_batch=450"], 1, 4, 2),
        (["train.micro_batch_size=null", "train.max_tokens_per_batch=64", "sharding=fsdp", "launch.devices=3"], 3, 1, 3),
        (["train.micro_batch_size=null", "train.max_tokens_per_batch=10000", "sharding=fsdp", "launch.devices=3"], 3, 3, 1),
    ],
)
def test_accumulation_follows(recipe, overrides, ranks, micro, accumulation):
    made = recipe(*overrides)
    assert (made.world_size, made.micro_batch_size, made.accumulation) == (ranks, micro, accumulation)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.global_batch_size=9"],
            r"not a multiple of micro_batch_size 2 × 1 ranks; the nearest that are: 8 and 10",
        ),
        (
            ["train.global_batch_size=10", "sharding=ddp", "launch.devices=2"],
            r"nearest that are: 8 and 12 \(or train.micro_batch_size 1 or 5\)",
        ),
        (
            ["train.global_batch_size=7", "sharding=ddp", "launch.devices=2"],
            r"does not divide over 2 ranks; the nearest that do: 6 and 8",
        ),
        (
            ["train.micro_batch_size=null", "train.max_tokens_per_batch=63"],
            r"train.max_tokens_per_batch: 63 does not hold one sequence of train.sequence_length 64; the least that works is 64",
        ),
        (
            ["train.max_tokens_per_batch=640"],
            r"train.max_tokens_per_batch: 640 given together with train.micro_batch_size 2, .*; leave out one of them",
        ),
        (["train.packing=true", "train.length_bucketing=3"], r"train.length_bucketing: 3 given together with train.packing"),
        (["train.length_bucketing=-1"], r"train.length_bucketing: -1 is too small; the least is 0"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        recipe(*overrides)


def test_a_launcher_decides_the_world_unless_the_user_said_otherwise(recipe):
    world = World(size=2, rank=0, local_size=2, launched=True)
    assert recipe("sharding=ddp", world=world).world_size == 2
    with pytest.raises(UserError, match="is 4, but the launcher started 2 ranks"):
        recipe("sharding=ddp", "launch.devices=4", world=world)


def test_torchrun_and_srun_are_recognised():
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert current_world(dict(torchrun)) == World(4, 3, 1, 2, launched=True)
    srun = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_PROCID": "2",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": "gpu[07-08]",
        "SLURM_JOB_ID": "31",
    }
    assert current_world(srun) == World(4, 2, 0, 2, launched=True)
    assert srun["MASTER_ADDR"] == "gpu07" and srun["MASTER_PORT"] == str(20000 + 31 * 31)
    assert current_world({"SLURM_JOB_ID": "31", "SLURM_NTASKS": "4"}) == World()  # a batch script without srun


@pytest.mark.parametrize(
    ("sharding", "says"),
    [
        ("{name: zero, tensor: 2}", "sharding.tensor: zero divides state and no layers; tensor parallelism is sharding=fsdp's"),
        ("{name: zero, context: 2}", "sharding.context: zero divides state and no sequences"),
        ("{name: ddp, tensor: 2}", "sharding.tensor: ddp keeps whole layers on every rank; use sharding=fsdp"),
    ],
)
def test_an_option_that_another_plugin_has_is_refused_with_that_plugin(recipe, sharding, says):
    with pytest.raises(UserError) as refused:
        recipe(f"sharding={sharding}")
    assert says in str(refused.value)
