"""Text piece by piece, compared with the text of all ids at once."""

from __future__ import annotations

import json
import pickle
import random

import pytest
import torch
from tokenizers import Tokenizer as Backend, decoders, models

from fw.errors import UserError
from fw.tokenizer import TextStream, Tokenizer, load_tokenizer
from tokenizer.directories import DIRECTORIES, TEXTS, metaspace, word_piece, write

REPLACEMENT = "\ufffd"
STREAMED = [name for name in DIRECTORIES if name != "word-piece"]


@pytest.fixture(scope="module", params=STREAMED)
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    return load_tokenizer(DIRECTORIES[request.param](tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("llama"), metaspace("pre_tokenizer")))


def pieces(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    stream = TextStream(tokenizer, **options)
    return [*(stream.push(index) for index in ids), stream.finish()]


def check(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    given = pieces(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(given) == whole  # so each beginning of the pieces is one of the text


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_are_the_text(tokenizer, skip):
    for text in TEXTS:
        check(tokenizer, tokenizer.encode(text), skip)
        check(tokenizer, tokenizer.encode(text, add_special_tokens=False), skip)
    check(tokenizer, [i for text in TEXTS for i in tokenizer.encode(text)], skip)


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_of_any_ids_are_their_text(tokenizer, skip):
    """Ids at random are mostly no valid UTF-8; runs of byte tokens among them are short."""
    chance = random.Random(0)
    for _ in range(150):
        check(tokenizer, [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randint(0, 25))], skip)


@pytest.mark.parametrize("skip", [True, False])
def test_pieces_after_others_are_the_rest_of_the_text(tokenizer, skip):
    """Wherever a text is cut, but for within a character."""
    cuts = 0
    for text in TEXTS:
        ids = tokenizer.encode(text)
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        for at in range(len(ids)):
            before = tokenizer.decode(ids[:at], skip_special_tokens=skip)
            if REPLACEMENT not in before and whole.startswith(before) and not tokenizer.id_to_token(ids[at]).startswith("<0x"):
                assert before + "".join(pieces(tokenizer, ids[at:], skip_special_tokens=skip, after=ids[:at])) == whole
                cuts += 1
    assert cuts > 50


def test_no_half_characters_and_no_needless_waiting(tokenizer):
    text = "漢字かな👩‍👩‍👧‍👦 e\u0301 مرحبا "
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer, skip_special_tokens=True)
    seen = ""
    for count, index in enumerate(ids, 1):
        piece = stream.push(index)
        assert REPLACEMENT not in piece
        seen += piece
        known = tokenizer.decode(ids[:count], skip_special_tokens=True).rstrip(REPLACEMENT)
        assert known.startswith(seen)
        if not tokenizer.id_to_token(index).startswith("<0x"):
            assert seen == known  # nothing is held back but what is incomplete


def test_many_ids_at_once(tokenizer):
    ids = tokenizer.encode(TEXTS[4] + TEXTS[9])
    stream = TextStream(tokenizer)
    text = stream.push(ids[:5]) + stream.push(torch.tensor(ids[5:9])) + stream.push([]) + stream.push(ids[9:]) + stream.finish()
    assert text == tokenizer.decode(ids)
    for again in (ids, tokenizer.encode(TEXTS[4], add_special_tokens=False)):
        assert [stream.push(again) + stream.finish() for _ in range(2)] == [tokenizer.decode(again)] * 2  # as new each time


BYTES = ["e2 82 ac", "f0 9f 99 82", "e2 82", "82 ac", "ff", "ed a0 80", "c0 af", "f4 90 80 80", "41", "e2 82 ac ff", "ff e2 82 ac", "e2 41"]


def test_runs_of_byte_tokens(llama):
    """As the library has it: one replacement per byte of a run that is not UTF-8."""
    word = llama.encode("the", add_special_tokens=False)
    for run in BYTES:
        data = bytes.fromhex(run)
        ids = [llama.token_to_id(f"<0x{byte:02X}>") for byte in data]
        for case in (ids, ids + word, word + ids, word + ids + word, ids + word + ids):
            check(llama, case, skip=True)
    euro = [llama.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert pieces(llama, word + euro + word)[len(word) :] == ["", "", "", "€ the", ""]


@pytest.mark.parametrize("name", ["gpt2", "llama2", "gemma"])
def test_bytes_at_random(name, tmp_path):
    tokenizer = load_tokenizer(DIRECTORIES[name](tmp_path))
    alphabet = Backend.from_file(str(tmp_path / "tokenizer.json")).get_vocab()
    if name == "gpt2":
        letters = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
        single = [index for token, index in letters.items() if len(token) == 1]
        assert len(single) == 256
    else:
        single = [alphabet[f"<0x{byte:02X}>"] for byte in range(256)]
    chance = random.Random(1)
    for _ in range(400):
        check(tokenizer, chance.choices(single, k=chance.randint(1, 12)), skip=True)


def test_invalid_bytes_do_not_hold_text_back(llama, tmp_path):
    byte = llama.token_to_id("<0xFF>")
    stream = TextStream(llama)
    assert "".join(stream.push(byte) for _ in range(1000)) == REPLACEMENT * 1000
    gpt2 = load_tokenizer(DIRECTORIES["gpt2"](tmp_path))
    stream = TextStream(gpt2)
    lead = gpt2.encode("🙂", add_special_tokens=False)[:1]
    got = "".join(stream.push(lead) for _ in range(1000))
    assert got == gpt2.decode(lead * 1000)[: len(got)] and len(got) >= 999


def test_a_long_run_of_byte_tokens_is_given_as_it_comes(llama):
    data = ("ऀ" * 200).encode()
    ids = [llama.token_to_id(f"<0x{byte:02X}>") for byte in data]
    given = pieces(llama, ids)
    assert "".join(given) == llama.decode(ids) == data.decode()
    held = 0
    for count, piece in enumerate(given, 1):
        held = held + 1 if not piece else 0
        assert held <= 33, count


def test_the_cost_of_a_token_does_not_grow(llama, monkeypatch):
    """No decoding of what came before: the library's decoder is not called at all, and nothing is kept."""
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: pytest.fail("decoded as a whole"))
    stream = TextStream(llama)
    ids = [i for text in TEXTS for i in llama.encode(text)]
    stream.push(ids)
    before = len(pickle.dumps(stream._steps[:3]))
    for _ in range(20):
        stream.push(ids)
    assert len(pickle.dumps(stream._steps[:3])) <= before + 64


def assembled(decoder) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(["▁▁a", "▁b", " ", "  c ", "<0xE2>", "x", "▁"])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer.from_backend(backend)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", "  ")]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
    ids=str,
)
def test_other_decoders(decoder):
    tokenizer = assembled(decoder)
    chance = random.Random(2)
    for _ in range(200):
        check(tokenizer, [chance.randrange(7) for _ in range(chance.randint(0, 6))], skip=False)


def test_decoders_that_need_the_whole_text_are_refused(tmp_path):
    with pytest.raises(UserError, match="text cannot be decoded piece by piece with the decoder WordPiece; decode it as a whole"):
        TextStream(load_tokenizer(write(tmp_path, word_piece())))
    with pytest.raises(UserError, match=r"the decoder Replace of {'String': 'ab'}"):
        TextStream(assembled(decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")])))
    with pytest.raises(UserError, match="the decoder Strip"):
        TextStream(assembled(decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)])))
