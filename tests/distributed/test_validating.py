"""A validation in the middle of a run leaves nothing behind: neither in what is saved nor in what is trained."""

from __future__ import annotations

from pathlib import Path

import yaml

import fw
from conftest import column, fw as run_fw


def train(*overrides: str) -> fw.TrainResult:
    return fw.train("tiny.yaml", *overrides)


def test_a_validation_changes_neither_what_is_saved_nor_what_is_trained(workspace):
    """FSDP leaves parameters whole and in the compute dtype after a forward without backward."""
    two = ("sharding=fsdp", "launch.devices=2", "precision=bf16", "train.max_steps=8", "train.save_every=4")
    run_fw("train", "tiny.yaml", *two, "train.val_every=2", "train.run_dir=one").ok()
    run_fw("train", "tiny.yaml", *two, "train.val_every=0", "train.run_dir=two").ok()
    for step in ("step-00000004", "step-00000008"):
        done = run_fw("checkpoint", "diff", f"one/checkpoints/{step}", f"two/checkpoints/{step}").ok()
        assert done.out == "84 tensors identical, 0 different\n"


def test_dropout_goes_on_where_it_was_whatever_is_validated(workspace):
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    config["model"] = {"name": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "resid_pdrop": 0.3, "embd_pdrop": 0.3}
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    train("train.max_steps=6", "train.run_dir=straight")
    train("train.max_steps=6", "train.val_every=1", "train.run_dir=validated")
    train("train.max_steps=3", "train.save_every=3", "train.run_dir=halves")
    train("train.max_steps=6", "train.run_dir=halves", "resume=auto")
    losses = column("straight", "loss")
    assert losses == column("halves", "loss") == column("validated", "loss")
    train("train.max_steps=6", "train.run_dir=none", "model.resid_pdrop=0.0", "model.embd_pdrop=0.0")
    assert column("none", "loss") != losses, "else there is no dropout to be tested"
