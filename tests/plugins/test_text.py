"""The text plugin: documents, split, tokenizers, blocks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer, processors

from conftest import corpus_text
from fw.config import Config, fill
from fw.errors import UserError
from fw.kinds.data import VaryingSamples
from fw.tokenizer import load_tokenizer
from fw_plugins.data.sources import cut, find_files, from_files, from_python
from fw_plugins.data.text import TextConfig, TextData
from fw_plugins.data.tokenizer import byte_tokenizer, train_bpe

AWKWARD = [
    "",
    "plain",
    "naïve café — 漢字 🙂",
    "tabs\tand\r\nlines\n\n",
    "<|endoftext|>",
    "\x00\x7f",
    " leading",
    "a" * 1000,
]


def make(tmp_path: Path, cache: Path, **options) -> TextData:
    if "files" not in options and options.get("source") != "python-docs":
        (tmp_path / "corpus.txt").write_text(corpus_text())
        options["files"] = [str(tmp_path / "corpus.txt")]
    data = TextData(TextConfig(cache_dir=str(cache), **options))
    data.prepare(lambda text: None)
    return data


@pytest.mark.parametrize("text", AWKWARD)
@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_tokenizers_lose_nothing_and_never_make_the_end_of_text(kind, text):
    tokenizer = byte_tokenizer() if kind == "byte" else train_bpe([corpus_text()], 400)
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids and all(0 <= i < tokenizer.vocab_size for i in ids)
    if kind == "byte":
        assert len(ids) == len(text.encode()) and tokenizer.vocab_size == 257


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_transformers_reads_the_saved_tokenizer(kind, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = byte_tokenizer() if kind == "byte" else train_bpe([corpus_text()], 400)
    tokenizer.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in AWKWARD:
        assert theirs(text)["input_ids"] == tokenizer.encode(text)
        assert theirs(text, split_special_tokens=True)["input_ids"] == tokenizer.encode(text, split_special_tokens=True)
    assert theirs.eos_token_id == tokenizer.eos_id and len(theirs) == tokenizer.vocab_size


def test_cut_pieces_are_the_text_and_no_longer_than_asked():
    text = corpus_text() + "\n" + "x" * 5000
    pieces = list(cut(text, 700))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 700


def test_no_document_is_in_both_splits_and_duplicates_are_dropped(tmp_path, cache):
    for i in range(40):
        (tmp_path / f"doc{i:02}.txt").write_text(f"document {i % 30}: " + corpus_text(3) * (1 + i % 30))
    data = make(tmp_path, cache, files=[str(tmp_path / "doc*.txt")], tokenizer="byte", val_fraction=0.2)
    corpus = data.open(32)
    train, val = corpus.train_text(), corpus.val_text()
    assert len(train) + len(val) == 30 and not set(train) & set(val) and val
    texts = {path.read_text() for path in tmp_path.glob("doc*.txt")}
    assert set(train) | set(val) == texts
    assert corpus.val_bytes == sum(len(text.encode()) for text in val)
    assert corpus.val_bytes >= 0.2 * sum(len(text.encode()) for text in texts)


def test_blocks_predict_every_token_once(tmp_path, cache):
    data = make(tmp_path, cache, tokenizer="byte")
    corpus = data.open(48)
    ids = np.memmap(next(Path(data._directory).glob("val.bin")), dtype="uint16", mode="r").astype(np.int64)
    labels = torch.cat([corpus.val[i]["labels"] for i in range(len(corpus.val))])
    assert labels[labels != -100].tolist() == ids[1:].tolist()
    for i in range(len(corpus.train)):
        sample = corpus.train[i]
        assert sample["input_ids"].shape == sample["labels"].shape == (48,)
        assert sample["input_ids"][1:].equal(sample["labels"][:-1])
    assert corpus.train_tokens - 1 - 48 < len(corpus.train) * 48 <= corpus.train_tokens - 1


def test_the_cache_is_used_again_and_replaced_when_the_text_changes(tmp_path, cache):
    said: list[str] = []
    data = make(tmp_path, cache, vocab_size=300)
    first = data.open(16).fingerprint
    again = TextData(data.config)
    again.prepare(said.append)
    assert not said and again.open(16).fingerprint == first
    (tmp_path / "corpus.txt").write_text(corpus_text(500))
    again.prepare(said.append)
    assert said and again.open(16).fingerprint != first


def test_a_half_built_cache_is_not_taken_for_a_whole_one(tmp_path, cache, monkeypatch):
    data = make(tmp_path, cache, vocab_size=301)
    directory = data._directory
    (directory / "meta.json").unlink()
    data.prepare(lambda text: None)
    assert json.loads((directory / "meta.json").read_text())["train"] > 0


def test_bpe_learns_from_the_training_split_only(tmp_path, cache):
    """Each document repeats a word of its own; merges that join such a word exist only for documents that are trained on."""
    for i in range(26):
        word = "".join(chr(ord("a") + (i * 7 + k * (i + 1)) % 26) for k in range(12))
        (tmp_path / f"d{i}.txt").write_text(f"{word} " * 200)
    data = make(tmp_path, cache, files=[str(tmp_path / "d*.txt")], vocab_size=1000, val_fraction=0.2)
    corpus = data.open(8)
    learnt = Tokenizer.from_file(str(data._directory / "tokenizer.json")).get_vocab()
    whole = {text: text.split()[0] in learnt or f"Ġ{text.split()[0]}" in learnt for text in corpus.train_text() + corpus.val_text()}
    assert all(whole[text] for text in corpus.train_text())
    assert not any(whole[text] for text in corpus.val_text())


def test_python_docs_are_there_in_every_python():
    documents = list(from_python())
    assert len(documents) > 300 and sum(map(len, documents)) > 1_000_000
    assert any("ternary" in text.lower() for text in documents)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine \xff bytes", r"bad.txt is not UTF-8 text: byte 5 is 0xff"),
        (b"", "0 documents, too few"),
        (b"one", "1 documents, too few"),
    ],
)
def test_unusable_text_is_refused(tmp_path, cache, content, message):
    (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        make(tmp_path, cache, files=[str(tmp_path / "bad.txt")])


def test_missing_files_and_too_little_text(tmp_path, cache):
    with pytest.raises(UserError, match=r"nothing\*\.txt' matches no file"):
        find_files([str(tmp_path / "nothing*.txt")])
    with pytest.raises(UserError, match=r"fill no sequence of 100000; give more text or set train.sequence_length"):
        make(tmp_path, cache, tokenizer="byte").open(100_000)


def test_one_file_may_be_given_without_a_list(tmp_path):
    config = Config("c", {"data": {"files": "a.txt"}}, {})
    filled = fill(TextConfig, config, ("data",), {"files": "a.txt"}, OmegaConf.create({}))
    assert filled.files == ["a.txt"]


def test_a_small_file_still_splits(tmp_path):
    (tmp_path / "small.txt").write_text(corpus_text(60))
    assert len(list(from_files([tmp_path / "small.txt"]))) > 10


def given(directory: Path, eos: str | None = "</s>") -> Path:
    """A model's directory: a tokenizer that puts a token before each text, and says how a text ends."""
    backend = Tokenizer.from_str(train_bpe([corpus_text(50)], 300)._backend.to_str())
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))])
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", **({"eos_token": eos} if eos else {})}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_a_models_own_tokenizer(tmp_path, cache):
    model = given(tmp_path / "model")
    for i in range(8):
        (tmp_path / f"doc{i}.txt").write_text(f"<s>document {i}</s> {corpus_text(1 + i % 4)}")
    corpus = make(tmp_path, cache, files=[str(tmp_path / "doc*.txt")], tokenizer=str(model)).open(16)
    ids = [i for k in range(len(corpus.val)) for i in corpus.val[k]["labels"].tolist() if i != -100]
    assert corpus.tokenizer.eos_id == 301 and ids.count(301) == len(corpus.val_text()) and 300 not in ids
    texts = {file.read_text() for file in tmp_path.glob("doc*.txt")}
    assert set(corpus.train_text()) | set(corpus.val_text()) == texts
    corpus.tokenizer.save(tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_the_cache_depends_on_the_tokenizers_content_not_on_its_place(tmp_path, cache):
    first = make(tmp_path, cache, tokenizer=str(given(tmp_path / "a")))
    said: list[str] = []
    moved = TextData(TextConfig(**{**first.config.__dict__, "tokenizer": str((tmp_path / "a").rename(tmp_path / "b"))}))
    moved.prepare(said.append)
    assert not said
    config = json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())
    (tmp_path / "b" / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "<s>"}))
    moved.prepare(said.append)
    assert said and moved.open(16).tokenizer.eos_id == 300
    assert moved.open(16).fingerprint != first.open(16).fingerprint


def test_unusable_tokenizers_are_refused(tmp_path, cache):
    with pytest.raises(UserError, match=r"data.tokenizer: 'bpee' is neither bpe nor byte nor a directory .*; did you mean 'bpe'\?"):
        TextConfig(files=["a.txt"], tokenizer="bpee")
    with pytest.raises(UserError, match=r"data.tokenizer: .*nowhere/at-all"):
        make(tmp_path, cache, tokenizer="nowhere/at-all")
    with pytest.raises(UserError, match=r"there is no tokenizer.json; copy"):
        make(tmp_path, cache, tokenizer=str(tmp_path))
    with pytest.raises(UserError, match=r"endless has no end-of-text token, .*; name one as eos_token in its tokenizer_config.json"):
        make(tmp_path, cache, tokenizer=str(given(tmp_path / "endless", eos=None)))


def test_documents_as_samples(tmp_path, cache):
    """What the stream has as targets, by document: the separator before it is the first input, that after it the last target."""
    sizes = [3, 40, 10, 9, 11, 21, 5, 30, 1, 19, 20, 8]
    for i, size in enumerate(sizes):
        (tmp_path / f"doc{i:02}.txt").write_text(chr(ord("a") + i) * size)
    options = {"files": [str(tmp_path / "doc*.txt")], "tokenizer": "byte", "val_fraction": 0.2}
    stream, data = (make(tmp_path, cache, samples=choice, **options) for choice in ("stream", "documents"))
    assert stream._directory == data._directory  # the ids are the same
    theirs, corpus = stream.open(10), data.open(10)
    assert theirs.fingerprint != corpus.fingerprint and theirs.train_text() == corpus.train_text()
    eos = corpus.tokenizer.eos_id
    for samples, texts, name in ((corpus.train, corpus.train_text(), "train"), (corpus.val, corpus.val_text(), "val")):
        assert isinstance(samples, VaryingSamples) and len(samples.lengths) == len(samples)
        expected = []
        for text in texts:
            ids = [eos, *corpus.tokenizer.encode(text), eos]
            expected += [(ids[k : k + 11][:-1], ids[k + 1 : k + 11]) for k in range(0, len(ids) - 1, 10)]
        found = [samples[i] for i in range(len(samples))]
        assert [(sample["input_ids"].tolist(), sample["labels"].tolist()) for sample in found] == expected
        assert [len(sample["labels"]) for sample in found] == samples.lengths.tolist()
        assert max(samples.lengths) == 10 or name == "val", "a long document was cut"
        ids = np.memmap(data._directory / f"{name}.bin", dtype="uint16", mode="r")
        assert torch.cat([sample["labels"] for sample in found]).tolist() == ids[1:].tolist()
    assert corpus.val_tokens - 1 == sum(corpus.val.lengths)  # what bits per byte counts on
    with pytest.raises(IndexError):
        corpus.train[len(corpus.train)]
    with pytest.raises(UserError, match=r"data\.isolate_documents: with data.samples=documents no document shares a sample"):
        TextConfig(samples="documents", isolate_documents=True, **options)


def test_documents_are_told_apart_where_that_is_asked_for(tmp_path, cache):
    for i in range(12):
        (tmp_path / f"doc{i:02}.txt").write_text("xyz"[i % 3] * (3 + i) + str(i))
    options = {"files": [str(tmp_path / "doc*.txt")], "tokenizer": "byte", "val_fraction": 0.3}
    plain, isolated = (make(tmp_path, cache, isolate_documents=choice, **options) for choice in (False, True))
    assert plain._directory == isolated._directory  # the ids are the same
    plain_corpus, corpus = plain.open(11), isolated.open(11)
    assert plain_corpus.fingerprint != corpus.fingerprint
    eos = corpus.tokenizer.eos_id
    several = 0
    for theirs, ours in ((plain_corpus.train, corpus.train), (plain_corpus.val, corpus.val)):
        assert len(theirs) == len(ours)
        for k in range(len(ours)):
            sample = ours[k]
            assert theirs[k].keys() == {"input_ids", "labels"}
            assert all(sample[name].equal(theirs[k][name]) for name in theirs[k])
            number, expected = 0, []
            padding = (sample["labels"] == -100).tolist()
            for position, index in enumerate(sample["input_ids"].tolist()):
                number += index == eos or position == 0
                expected.append(0 if padding[position] else number)
            assert sample["segments"].tolist() == expected and sample["segments"].dtype == torch.int64
            several += max(expected) > 1
    assert several > 3 and 0 in corpus.val[len(corpus.val) - 1]["segments"]
    assert load_tokenizer(isolated._directory).eos_id == eos
