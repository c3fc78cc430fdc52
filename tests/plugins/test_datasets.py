"""Records of Hugging Face's `datasets`: of a directory that it wrote, of one with files, as they come or not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import tokens
from conftest import column, environment, fw, own_cache, summary
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.data import DataPlugin

datasets = pytest.importorskip("datasets")

RECORDS = [{"prompt": f"what is {n}", "completion": f"it is {n * n}", "number": n} for n in range(60)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The same records as lines, as files of a dataset, and as `save_to_disk` writes them, whole and by split."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FW_CACHE", own_cache(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    tokens.save(tmp_path / "tokenizer", 131)
    lines = [json.dumps(record) + "\n" for record in RECORDS]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    (tmp_path / "first.jsonl").write_text("".join(lines[:50]))
    (tmp_path / "rest.jsonl").write_text("".join(lines[50:]))
    (tmp_path / "files").mkdir()
    datasets.Dataset.from_list(RECORDS[:50]).to_parquet(tmp_path / "files" / "train-00000.parquet")
    datasets.Dataset.from_list(RECORDS[50:]).to_parquet(tmp_path / "files" / "test-00000.parquet")
    datasets.Dataset.from_list(RECORDS).save_to_disk(tmp_path / "whole")
    both = {"train": datasets.Dataset.from_list(RECORDS[:50]), "test": datasets.Dataset.from_list(RECORDS[50:])}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "both")
    return tmp_path


def corpus(**options):
    plugin = make(DataPlugin, "jsonl", tokenizer="tokenizer", **options)
    plugin.prepare(lambda told: None)
    return plugin.open(64)


def same(one, other):
    assert len(one.train) == len(other.train) > 0 and len(one.val) == len(other.val) > 0
    for mine, theirs in ((one.train, other.train), (one.val, other.val)):
        for index in range(len(mine)):
            assert all(torch.equal(mine[index][key], theirs[index][key]) for key in ("input_ids", "labels"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("directory", ["files", "both"])
def test_splits_are_the_records_of_their_files(place, directory, streaming):
    expected = corpus(files=["first.jsonl"], val_files=["rest.jsonl"])
    same(corpus(dataset=directory, val_split="test", streaming=streaming), expected)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_part_is_held_out_as_of_files(place, streaming):
    same(corpus(dataset="whole", streaming=streaming), corpus(files=["all.jsonl"]))


def test_what_was_read_is_not_read_again_unless_files_change(place, monkeypatch):
    before = corpus(dataset="files", val_split="test").fingerprint
    read = []
    load = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **more: (read.append(1), load(*args, **more))[1])
    assert corpus(dataset="files", val_split="test").fingerprint == before and not read
    datasets.Dataset.from_list(RECORDS[:40]).to_parquet(place / "files" / "train-00000.parquet")
    assert corpus(dataset="files", val_split="test").fingerprint != before and read


def test_a_part_of_a_split(place):
    assert len(corpus(dataset="files", split="train[:20%]", val_split="test").train) == 10


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"dataset": "whole", "files": ["all.jsonl"]}, "data.dataset: there are data.files too"),
        ({"files": ["all.jsonl"], "split": "test"}, "data.split: is of a dataset"),
        ({"dataset": "both", "split": "nonsense"}, r"data.split: both has no 'nonsense' \(there are: train, test;"),
        ({"dataset": "whole", "val_split": "test"}, r"data.split: whole has no 'test' \(there are: train;"),
        ({"dataset": "both", "split": "train[:10%]"}, "parts of one are named only of datasets with files"),
        ({"dataset": "both", "subset": "en"}, "data.subset: both is one that save_to_disk wrote"),
        ({"dataset": "files", "split": "nonsense"}, "data.dataset: files cannot be opened: .*nonsense"),
        (
            {"dataset": "whole", "on_bad": "stop", "prompt": "nothing"},
            r"data.dataset: whole \[train\] row 1: it has neither text nor nothing",
        ),
        ({"dataset": "no such/dataset/anywhere"}, "is neither a directory nor a dataset of the hub"),
    ],
)
def test_what_is_wrong_is_said(place, options, sentence):
    with pytest.raises(UserError, match=sentence):
        corpus(**options)


def test_the_hub_is_asked_for_its_commit_unless_one_is_given(place):
    # A process of its own: where the hub is, huggingface_hub reads when it is imported. Nobody listens there.
    program = (
        "from fw.errors import UserError; from fw_plugins.data.datasets_source import DatasetRecords as Records\n"
        "print(Records('acme/sums', '', 'train', 40 * 'a', False).identity())\n"
        "try:\n    Records('acme/sums', '', 'train', 'main', False).identity()\nexcept UserError as error:\n    print(error)\n"
    )
    env = {**environment(), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    first, second = told.stdout.splitlines()
    assert first == str(["acme/sums", "", "train", 40 * "a"])
    assert second.startswith("data.dataset: the hub cannot be asked for acme/sums") and "HF_HUB_OFFLINE=1" in second, told.stderr


def test_a_streaming_run_that_was_interrupted_goes_on_as_if_it_was_not(place, monkeypatch):
    """In the middle of the second round, whose order is another: the unbroken run's losses."""
    model = "{name: llama, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 48}"
    (place / "run.yaml").write_text(f"""
model: {model}
data: {{name: jsonl, dataset: files, val_split: test, streaming: true, tokenizer: tokenizer}}
optimizer: {{name: adamw, lr: 1e-2}}
train: {{max_steps: 8, global_batch_size: 16, sequence_length: 64, val_every: 8, save_every: 5, sample_tokens: 0, run_dir: run}}
launch: {{accelerator: cpu}}
""")
    fw("train", "run.yaml", "train.run_dir=unbroken").ok()
    losses = column("unbroken", "loss")
    assert len(losses) == 8 and losses[-1] < losses[0]

    monkeypatch.setenv("FW_CACHE", own_cache(place / "other"))  # where nothing of the unbroken run's ids is
    fw("train", "run.yaml", "train.max_steps=5").ok()
    assert column("run", "loss") == losses[:5]
    done = fw("train", "run.yaml", "resume=auto").ok()
    assert "step 8/8" in done.err and column("run", "loss") == losses
    assert summary("run")["val_loss"] == summary("unbroken")["val_loss"]
