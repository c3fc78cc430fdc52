"""Ids and text, compared with transformers' AutoTokenizer on the same directories."""

from __future__ import annotations

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fw.errors import UserError
from fw.tokenizer import Tokenizer, load_tokenizer
from tokenizer.directories import (
    DIRECTORIES,
    END,
    FAST,
    TEXTS,
    byte_level,
    flagged,
    metaspace,
    qwen,
    qwen_config,
    unigram,
    word_piece,
    write,
)


@pytest.fixture(scope="module", params=DIRECTORIES)
def directory(request, tmp_path_factory) -> Path:
    return DIRECTORIES[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def theirs(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def ours(directory) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.mark.parametrize("split", [None, False, True])
@pytest.mark.parametrize("special", [True, False])
def test_ids_are_those_of_transformers(ours, theirs, special, split):
    expected = [theirs(text, add_special_tokens=special, split_special_tokens=split)["input_ids"] for text in TEXTS]
    assert [ours.encode(text, add_special_tokens=special, split_special_tokens=split) for text in TEXTS] == expected
    assert ours.encode_all(TEXTS, add_special_tokens=special, split_special_tokens=split) == expected
    assert all(0 <= index < ours.vocab_size for ids in expected for index in ids)


@pytest.mark.parametrize("skip", [True, False])
def test_text_is_that_of_transformers(ours, theirs, skip):
    for text in TEXTS:
        ids = ours.encode(text)
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == expected
        assert ours.decode(torch.tensor(ids, dtype=torch.int64), skip_special_tokens=skip) == expected
    everything = list(range(ours.vocab_size))
    assert ours.decode(everything, skip_special_tokens=skip) == theirs.decode(everything, skip_special_tokens=skip)


def test_special_tokens_are_those_of_transformers(ours, theirs):
    for name in ("bos", "eos", "pad", "unk"):
        assert getattr(ours, f"{name}_token") == getattr(theirs, f"{name}_token"), name
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_token_id"), name
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.special_ids == {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    vocabulary = theirs.get_vocab()
    assert len(ours) == len(theirs) and ours.vocab_size == max(vocabulary.values()) + 1
    for token, index in vocabulary.items():
        assert ours.token_to_id(token) == index
        assert ours.id_to_token(index) == theirs.convert_ids_to_tokens(index)
    assert ours.token_to_id("no such token") is None
    assert ours.id_to_token(-1) is None and ours.id_to_token(ours.vocab_size) is None


def test_files_are_given_back_unchanged(ours, directory, tmp_path):
    ours.save(tmp_path / "copy")
    before = {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "config.json"}
    assert {file.name: file.read_bytes() for file in (tmp_path / "copy").iterdir()} == before


def test_copies_do_the_same(ours):
    spelled = [token for token in map(ours.id_to_token, sorted(ours.special_ids)) if token]
    text = " ".join(["text", *spelled])
    expected = [ours.encode(text, split_special_tokens=split) for split in (False, True)]
    for other in (pickle.loads(pickle.dumps(ours)), copy.deepcopy(ours)):
        assert [other.encode(text, split_special_tokens=split) for split in (False, True)] == expected


def test_the_configurations_differ_in_what_they_do(tmp_path):
    """What the comparison with transformers would not show: that the directories exercise different rules."""
    loaded = {name: load_tokenizer(make(tmp_path / name)) for name, make in DIRECTORIES.items()}
    text = "<s>the model 1234</s> e\u0301"
    assert loaded["llama2"].encode(text) != loaded["llama2-legacy"].encode(text) != loaded["llama2-no-prefix"].encode(text)
    assert loaded["llama2"].encode(text) != loaded["mistral"].encode(text)
    assert loaded["qwen2"].encode("1234 e\u0301") != loaded["gpt2"].encode("1234 e\u0301")
    assert loaded["gpt2-its-class"].encode("word") == loaded["gpt2-its-class"].encode(" word")
    assert loaded["gpt2"].encode("word") != loaded["gpt2"].encode(" word")
    assert loaded["llama2"].encode("a")[0] == loaded["llama2"].bos_id
    assert loaded["llama2"].encode("a")[-1] != loaded["llama2"].eos_id  # add_eos_token stands in the configuration only
    assert loaded["gemma-new-token"].vocab_size == loaded["gemma"].vocab_size + 1  # <mask>


def test_a_special_token_is_only_made_where_that_is_asked_for(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), {"tokenizer_class": FAST, "eos_token": END}))
    text = f"one{END}two"
    assert tokenizer.encode(text).count(tokenizer.eos_id) == 1
    assert tokenizer.eos_id not in tokenizer.encode(text, split_special_tokens=True)
    assert tokenizer.decode(tokenizer.encode(text, split_special_tokens=True), skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "onetwo"


def test_threads_do_not_disturb_each_other(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), {"tokenizer_class": FAST, "eos_token": END}))
    text = f"one{END}two" * 50
    expected = {split: tokenizer.encode(text, split_special_tokens=split) for split in (False, True)}
    wanted = [i % 3 == 0 for i in range(300)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda split: tokenizer.encode(text, split_special_tokens=split), wanted))
    assert got == [expected[split] for split in wanted] and expected[False] != expected[True]


def test_one_that_was_made_is_read_by_transformers(tmp_path):
    from transformers import AutoTokenizer

    made = Tokenizer.from_backend(flagged(), eos_token=END, pad_token="[R]", chat_template="{{ messages[0].content }}{{ eos_token }}")
    made.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert [made.encode(text) for text in TEXTS] == theirs(TEXTS)["input_ids"]
    assert (made.bos_id, made.eos_id, made.pad_id) == (None, theirs.eos_token_id, theirs.pad_token_id)
    chat = [{"role": "user", "content": "the text"}]
    assert made.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False) == f"the text{END}"
    assert load_tokenizer(tmp_path).fingerprint == made.fingerprint


def test_the_fingerprint_depends_on_files_and_class(tmp_path):
    plain = load_tokenizer(write(tmp_path / "a", byte_level(), {"tokenizer_class": FAST})).fingerprint
    assert load_tokenizer(write(tmp_path / "b", byte_level(), {"tokenizer_class": FAST})).fingerprint == plain
    assert load_tokenizer(write(tmp_path / "c", byte_level(), {"tokenizer_class": FAST, "eos_token": END})).fingerprint != plain
    (tmp_path / "b" / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert load_tokenizer(tmp_path / "b").fingerprint != plain


def refused(tmp_path, config, tokenizer=None, **others) -> str:
    with pytest.raises(UserError) as caught:
        load_tokenizer(write(tmp_path, tokenizer or byte_level(), config, **others))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"tokenizer_class": "BertTokenizerFast"}, "tokenizer_class BertTokenizer has rules of its own that are not known here"),
        ({"tokenizer_class": "CohereTokenizer"}, 'set "tokenizer_class": "PreTrainedTokenizerFast"'),
        ({"tokenizer_class": 5}, "tokenizer_class is 5, not a name"),
        ({"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.Slow", "own.Fast"]}}, "auto_map asks for code"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.json"]}, "fast_tokenizer_files is not supported; remove it"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex is not supported; set it to false"),
        (
            {"clean_up_tokenization_spaces": True, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True},
            "corrupt_output takes spaces out of decoded text",
        ),
        ({"eos_token": 7}, "eos_token: 7 is not a token"),
        ({"extra_special_tokens": "x"}, "extra_special_tokens is a str; write a list of tokens"),
        ({"chat_template": 3}, "chat_template: it is neither a template nor a list"),
        ({"added_tokens_decoder": {"9": {"content": END}}}, f"token '{END}' has id 9 in the configuration and gets 420"),
        ({"added_tokens_decoder": {"500": {"content": "<new>"}}}, "token '<new>' has id 500 in the configuration and gets 421"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(tmp_path, config, message):
    assert message in refused(tmp_path, config)


def test_spaces_are_not_taken_out_of_text(tmp_path):
    said = refused(tmp_path, {"tokenizer_class": FAST, "clean_up_tokenization_spaces": True}, word_piece())
    assert "clean_up_tokenization_spaces takes spaces out of decoded text" in said


def test_a_class_whose_vocabulary_is_of_another_kind_is_refused(tmp_path):
    assert "its model is Unigram, and tokenizer_class LlamaTokenizer is a BPE" in refused(
        tmp_path, {"tokenizer_class": "LlamaTokenizer"}, unigram()
    )


def test_a_rebuilt_tokenizer_keeps_the_ids_of_the_file(tmp_path):
    """Qwen's class numbers what is declared, one after the other; where the file has a gap, its ids would be others."""
    write(tmp_path, qwen())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<|im_start|>"]
    config = qwen_config()
    config["added_tokens_decoder"] = {str(t["id"]): {"content": t["content"], "special": t["special"]} for t in content["added_tokens"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "additional_special_tokens": []}))
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"token '<\|im_end\|>' has id 422 in the configuration and gets 421"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "there is no tokenizer.json; copy"),
        ({"tokenizer.model": b"x"}, "there is tokenizer.model and no tokenizer.json, the only format read here; convert it"),
        ({"tokenizer.json": b"{"}, r"tokenizer.json: the tokenizers library cannot read it: .*; copy it anew"),
        ({"tokenizer.json": b"\xff"}, "tokenizer.json is not UTF-8 text: byte 0 is 0xff"),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"{\n\n,"}, "tokenizer_config.json, line 3: "),
        ({"tokenizer.json": b"{}", "tokenizer_config.json": b"[]"}, "tokenizer_config.json: it holds a list, not an object"),
        ({"tokenizer.json": b"{}", "config.json": b"?"}, "config.json, line 1: "),
    ],
)
def test_damaged_directories(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_no_directory_at_all(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_half_a_character_is_no_text(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, metaspace("normalizer")))
    for call in (tokenizer.encode, lambda text: tokenizer.encode_all(["fine", text])):
        with pytest.raises(UserError, match="character 3 is '\\\\ud83d', half of a surrogate pair"):
            call("abc\ud83d")
