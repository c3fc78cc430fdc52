"""Random ids: functions of their number, of the range and lengths asked for; a run with them from data to checkpoint."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import column, summary
from fw.errors import UserError
from fw.kinds.data import VaryingSamples
from fw.tokenizer import load_tokenizer
from fw_plugins.data.synthetic import SyntheticConfig, SyntheticData, draw, number_tokenizer

SYNTHETIC = ["data={name: synthetic, vocab_size: 300, samples: 64, val_samples: 5}"]


def opened(length: int = 32, **options):
    return SyntheticData(SyntheticConfig(**options)).open(length)


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 5, 1001, 10**15 + 3])
def test_any_part_of_a_stream_is_what_it_is_in_the_whole(start):
    whole = draw(0, 1000, start - start % 4, 40)
    assert draw(0, 1000, start, 30).tolist() == whole[start % 4 : start % 4 + 30].tolist()


def test_streams_differ_and_are_uniform():
    numbers = draw(0, 10, 0, 100_000)
    assert np.bincount(numbers, minlength=10) == pytest.approx(10_000, rel=0.05)
    assert (numbers[:-1] == numbers[1:]).mean() == pytest.approx(0.1, rel=0.05)
    assert (numbers == draw(1, 10, 0, 100_000)).mean() == pytest.approx(0.1, rel=0.05)


def test_samples_are_shifted_by_one_and_the_same_whenever_they_are_read():
    corpus, again = opened(vocab_size=1000), opened(vocab_size=1000)
    assert len(corpus.train) == 1_000_000 and not isinstance(corpus.train, VaryingSamples)
    for index in (999_999, 7, 0):
        sample = corpus.train[index]
        assert sample["input_ids"].shape == sample["labels"].shape == (32,) and sample["labels"].dtype == torch.int64
        assert sample["input_ids"][1:].equal(sample["labels"][:-1])
        assert sample["labels"].equal(again.train[index]["labels"])
        assert int(sample["labels"].min()) >= 0 and int(sample["labels"].max()) < 999
    assert corpus.train[8]["input_ids"][0] == corpus.train[7]["labels"][-1]
    assert not corpus.train[0]["labels"].equal(corpus.val[0]["labels"])
    assert corpus.fingerprint == again.fingerprint != opened(vocab_size=999).fingerprint
    for index in (-1, 1_000_000):
        with pytest.raises(IndexError):
            corpus.train[index]


def test_documents_have_lengths_of_the_range_each_equally_likely():
    corpus = opened(samples=40_000, min_length=29)
    assert isinstance(corpus.train, VaryingSamples) and isinstance(corpus.val, VaryingSamples)
    values, counts = np.unique(corpus.train.lengths, return_counts=True)
    assert values.tolist() == [29, 30, 31, 32] and counts == pytest.approx(10_000, rel=0.05)
    for index in range(20):
        sample = corpus.train[index]
        assert len(sample["labels"]) == len(sample["input_ids"]) == corpus.train.lengths[index]
        assert sample["input_ids"][1:].equal(sample["labels"][:-1])
    assert corpus.train_tokens == corpus.train.lengths.sum() + 1
    with pytest.raises(IndexError):
        corpus.train[40_000]


@pytest.mark.parametrize("options", [{}, {"min_length": 3}])
def test_validation_bytes_are_those_of_the_labels_text(options):
    corpus = opened(vocab_size=2000, val_samples=7, **options)
    labels = [corpus.val[index]["labels"].tolist() for index in range(7)]
    assert corpus.val_text() == [" ".join(map(str, row)) for row in labels]
    assert corpus.val_bytes == sum(len(text.encode()) for text in corpus.val_text())
    assert corpus.val_tokens - 1 == sum(map(len, labels))


def test_the_tokenizer_reads_and_writes_numbers_and_so_does_transformers_from_its_files(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = number_tokenizer(1000)
    assert tokenizer.vocab_size == 1000
    assert tokenizer.encode("12 0  998\n7") == [12, 0, 998, 7]
    assert tokenizer.decode([12, 0, 998, 7]) == "12 0 998 7"
    assert tokenizer.encode("12 999 text") == [12, 999, 999], "what is no number below 999 is unknown"
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("5 6") == AutoTokenizer.from_pretrained(tmp_path)("5 6")["input_ids"] == [5, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 1}, "data.vocab_size: 1 is not from 2"),
        ({"samples": 0}, "data.samples: 0 is too small"),
        ({"val_samples": 0}, "data.val_samples: 0 is too small"),
        ({"min_length": 0}, "data.min_length: 0 is too small"),
        ({"min_length": 33}, "data.min_length: 33 is more than train.sequence_length 32"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        opened(**options)


def test_a_run_trains_validates_samples_saves_and_resumes(workspace, fw):
    options = ["train.val_every=2", "train.save_every=2", "train.sample_tokens=6"]
    done = fw("train", "tiny.yaml", *SYNTHETIC, "train.max_steps=4", *options).ok()
    found = summary("run")
    assert found["val_loss"] == pytest.approx(math.log(299), rel=0.05), "nothing can be learnt"
    corpus = opened(64, vocab_size=300, samples=64, val_samples=5)
    assert found["val_bits_per_byte"] == pytest.approx(found["val_loss"] / math.log(2) * 5 * 64 / corpus.val_bytes)
    prompt, continued = done.out.split("over):\n")[1].split("\n")[0].split("▸")
    assert corpus.val_text()[0].startswith(prompt) and len(continued.split()) == 6
    assert load_tokenizer("run").vocab_size == 300
    straight = fw("train", "tiny.yaml", *SYNTHETIC, "train.max_steps=6", "train.run_dir=straight")
    assert straight.code == 0
    fw("train", "tiny.yaml", *SYNTHETIC, "train.max_steps=6", "resume=auto").ok()
    assert column("run", "loss")[-2:] == column("straight", "loss")[-2:]
    other = fw("train", "tiny.yaml", "data={name: synthetic, vocab_size: 301}", "resume=auto")
    assert other.code == 2 and "trained on other data" in other.err


def test_documents_are_packed_and_batched_by_tokens(workspace, fw):
    for name, option in (("packed", "train.packing=true"), ("bounded", "train.max_tokens_per_batch=128")):
        more = ["train.micro_batch_size=null", "train.max_steps=2", f"train.run_dir={name}"]
        fw("train", "tiny.yaml", *SYNTHETIC, "data.min_length=5", option, *more).ok()
        assert column(name, "loss") == pytest.approx([math.log(299)] * 2, rel=0.05)
        assert json.loads((Path(name) / "summary.json").read_text())["steps"] == 2
