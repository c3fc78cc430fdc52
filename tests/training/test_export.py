"""What a run leaves behind: a checkpoint that transformers loads, and the files of the run directory."""

from __future__ import annotations

import csv
import importlib
import json
import logging
import os
import re
import threading
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

from conftest import fw, metrics, summary
from fw.assemble import assemble
from fw.config import load
from fw.place import place
from fw.recipe import resolve

SAVE = ("train.max_steps=4", "train.save_every=4", "train.val_every=2", "train.sample_tokens=8")


@pytest.mark.parametrize(
    "options",
    [
        ("checkpoint.max_shard_size=100KB",),
        ("model.tie_word_embeddings=true", "model.vocab_size=300"),
        ("sharding=fsdp", "launch.devices=2", "checkpoint.max_shard_size=100KB"),
    ],
    ids=["several files", "tied, larger vocabulary", "written by two ranks"],
)
def test_transformers_loads_the_checkpoint(workspace, options):
    fw("train", "tiny.yaml", *SAVE, *options).ok()
    directory = Path("run/checkpoints/latest")
    theirs = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    recipe = resolve(load("tiny.yaml", [o for o in options if not o.startswith(("sharding", "launch"))]))
    reader = recipe.checkpoint.open(place(directory))
    assert reader.damages() == []
    ours = assemble(recipe, theirs.config.vocab_size, None, torch.device("cpu"), reader).model
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer("the model reads text and learns", return_tensors="pt")["input_ids"]
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=0)
    files = sorted(path.name for path in directory.glob("model*.safetensors"))
    if "100KB" in "".join(options):
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        assert len(files) > 2 and set(index["weight_map"].values()) == set(files)
    else:
        assert files == ["model.safetensors"]


def test_no_pickle_and_no_wrapper_prefix_is_in_a_checkpoint(workspace):
    fw("train", "tiny.yaml", *SAVE, "sharding=ddp", "launch.devices=2", "train.compile=true").ok()
    directory = Path("run/checkpoints/latest")
    assert {p.suffix for p in directory.iterdir()} <= {".safetensors", ".json", ".yaml"}
    with safe_open(directory / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert names and not [n for n in names if "module." in n or "_orig_mod" in n]


def test_the_run_directory(workspace):
    done = fw(
        "train",
        "tiny.yaml",
        *SAVE,
        "train.log_every=3",
        "logger=[csv, tensorboard]",
        "memory.budget=64GiB",
        "resume=auto",
    ).ok()
    run = Path("run")
    rows = metrics(run)
    assert [row["step"] for row in rows] == [2, 3, 4]  # every third, those with a validation, the last
    assert [row["val_loss"] is not None for row in rows] == [True, False, True]
    with (run / "metrics.csv").open() as file:
        columns = next(csv.reader(file))
    assert ",".join(columns[:9]) == "step,tokens,loss,grad_norm,lr,tokens_per_s,mfu,peak_memory_bytes,val_loss"
    assert all(name.startswith(("memory/", "memory_planned/")) for name in columns[9:]), "of the step that was measured"
    assert [row["memory/allocated_peak"] is not None for row in rows] == [True, False, False]
    found = summary(run)
    assert found["steps"] == 4 and found["tokens"] == 4 * 8 * 64 and found["train_loss"] == rows[-1]["loss"]
    assert found["val_loss"] == rows[-1]["val_loss"] and found["peak_memory_bytes"] > 0
    assert 0 < found["fourgram_bits_per_byte"] < found["bigram_bits_per_byte"] < 8
    assert found["val_bits_per_byte"] == pytest.approx(found["val_loss"] / 0.693147, rel=0.05)  # bytes are tokens here
    resolved = yaml.safe_load((run / "config.resolved.yaml").read_text())
    assert resolved["optimizer"]["eps"] == 1e-8 and resolved["train"]["log_every"] == 3
    origins = json.loads((run / "origins.json").read_text())
    assert origins["train.log_every"] == "override train.log_every=3" and origins["optimizer.eps"] == "default"
    assert json.loads((run / "plugins.json").read_text())["optimizer.adamw"].startswith("fw ")
    assert list((run / "tensorboard").glob("events*"))
    for name in ("config.yaml", "config.resolved.yaml", "origins.json", "plugins.json"):
        assert (run / "checkpoints/latest" / name).read_text() == (run / name).read_text()
    assert (run / "checkpoints/latest").is_symlink() and not (run / "checkpoints/latest").readlink().is_absolute()
    page = (run / "report.html").read_text()
    assert "<svg" in page and not re.search(r"(src|href)\s*=|https?://[^<]*\.(js|css)", page)
    for text in ("byte 4-gram", "validation bits per byte", "memory budget", "sample"):
        assert text in done.out, text


def test_the_stored_config_repeats_the_run(workspace):
    Path("base.yaml").write_text("extends: tiny.yaml\ntrain: {max_steps: 3, seed: 5}\n")
    fw("train", "base.yaml", "optimizer.lr=0.002").ok()
    fw("train", "run/config.yaml", "train.run_dir=again").ok()
    assert [row["loss"] for row in metrics("run")] == [row["loss"] for row in metrics("again")]


def test_the_python_api_may_be_called_twice_in_a_process(workspace):
    import fw as package

    importlib.import_module("pytorch_lightning")  # which sets a variable of its own
    before = dict(os.environ)
    first = package.train("tiny.yaml", "train.max_steps=3", "train.run_dir=a")
    second = package.train("tiny.yaml", "train.max_steps=3", "train.run_dir=b")
    assert first.exit_code == second.exit_code == 0 and first.summary["steps"] == 3
    assert first.summary["train_loss"] == second.summary["train_loss"]
    both = package.train("tiny.yaml", "train.max_steps=3", "train.run_dir=c", "sharding=ddp", "launch.devices=2")
    assert both.summary["train_loss"] == pytest.approx(first.summary["train_loss"], rel=1e-5)
    assert dict(os.environ) == before


def test_a_run_leaves_the_process_as_it_was(workspace):
    """Random numbers, threads, warnings and loggers are the caller's; and who trains may be any thread."""
    import random
    import warnings

    import numpy as np
    import torch

    import fw as package

    def drawn():
        return torch.rand(1).item(), np.random.rand(), random.random()

    lightning = logging.getLogger("pytorch_lightning")
    lightning.setLevel(logging.INFO)
    threads = torch.get_num_threads()
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(7)
    expected = drawn()
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(7)
    filters = list(warnings.filters)
    options = ["train.max_steps=2", "train.save_every=0", "train.sample_tokens=0", f"launch.threads={threads + 1}"]
    package.train("tiny.yaml", *options)
    assert warnings.filters == filters and lightning.level == logging.INFO and torch.get_num_threads() == threads
    assert drawn() == expected
    ended = []
    thread = threading.Thread(target=lambda: ended.append(package.train("tiny.yaml", *options, "train.run_dir=b").exit_code))
    thread.start()
    thread.join()
    assert ended == [0]


def test_the_default_run_directory_has_the_configs_name(workspace):
    fw("train", "tiny.yaml", "train.max_steps=1", "train.run_dir=''").ok()
    assert Path("runs/tiny/summary.json").is_file()
