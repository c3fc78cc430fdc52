"""The text of an answer up to what ends it, against looking for that in the whole."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer as Backend, decoders, models

import tokens
from fw.inference.text import AnswerText
from fw.tokenizer import Tokenizer

TOKENIZER = tokens.characters(60)


def given(text: str, stops: list[str], least: int = 0) -> tuple[list[str], str | None]:
    """What each character of a text gives, and the rest."""
    stream = AnswerText(TOKENIZER, stops, least)
    pieces = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        pieces.append(stream.push(token))
        if stream.stopped_by is not None:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.given
    return pieces, stream.stopped_by


def test_a_stop_never_shows():
    pieces, stopped_by = given("ababac. end of it", ["abac", " end"])
    assert "".join(pieces) == "ab" and stopped_by == "abac"
    assert pieces[:2] == ["", ""], "ab may begin it"
    pieces, stopped_by = given("one two end of it", ["abac", " end"])
    assert "".join(pieces) == "one two" and stopped_by == " end"
    pieces, stopped_by = given("no such thing. en", [" end"])
    assert "".join(pieces) == "no such thing. en" and stopped_by is None, "what only began it comes in the end"


def test_a_stop_before_the_least_number_of_tokens_is_text():
    assert given("a. b. c. d", ["."], least=5) == ([*"a. b. c", "", ""], "."), "the fifth token is one of the least"
    assert given("a. b. c. d", ["."], least=4) == ([*"a. b", "", ""], ".")


@pytest.mark.parametrize("seed", range(50))
def test_pieces_are_the_text_before_the_first_stop(seed):
    chance = random.Random(seed)
    text = "".join(chance.choice("ab.") for _ in range(30))
    stops = ["".join(chance.choice("ab.") for _ in range(chance.randint(1, 5))) for _ in range(chance.randint(0, 3))]
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    begins = [text.find(stop) for stop in stops if stop in text and text.find(stop) + len(stop) == min(ends)]
    pieces, stopped_by = given(text, stops)
    assert "".join(pieces) == (text[: min(begins)] if begins else text)
    assert (stopped_by is not None) == bool(begins)


def _of_bytes() -> Tokenizer:
    """Llama 2's way: what is no piece is bytes, a line's end among it."""
    words = ["<unk>", "\u2581a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = Backend(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer.from_backend(backend)


OF_BYTES = _of_bytes()


def ended(words: list[str], stops: list[str], least: int = 0) -> tuple[str, str | None, int]:
    """Text, what ended it, and by which token."""
    stream = AnswerText(OF_BYTES, stops, least)
    for number, word in enumerate(words):
        stream.push(OF_BYTES.token_to_id(word))
        if stream.stopped_by is not None:
            return stream.given, stream.stopped_by, number
    stream.finish()
    return stream.given, stream.stopped_by, len(words)


@pytest.mark.parametrize(
    ("words", "stops", "least", "found"),
    [
        (["\u2581a", "<0x0A>", "b"], ["\n"], 0, ("a", "\n", 1)),
        (["\u2581a", "<0x0A>", "<0x0A>", "b"], ["\n\n"], 0, ("a", "\n\n", 2)),
        (["\u2581a", "<0x0A>", "b", "\u2581a"], ["\nb"], 0, ("a", "\nb", 2)),
        (["\u2581a", "<0x0A>", "\u2581a"], ["\n a"], 0, ("a", "\n a", 2)),
        (["\u2581a", "<0xC3>", "<0xA9>", "b"], ["\u00e9"], 0, ("a", "\u00e9", 2)),
        (["\u2581a", "<0xC3>", "<0x0A>", "b"], ["\n"], 0, ("a\ufffd\ufffdb", None, 4)),
        (["\u2581a", "<0x0A>", "b", "<0x0A>", "b"], ["\n"], 3, ("a\nb", "\n", 3)),
        (["\u2581a", "<0x0A>", "b", "b", "b"], ["\n"], 3, ("a\nbbb", None, 5)),
        (["<0x0A>"] * 40, ["\n" * 34], 0, ("", "\n" * 34, 33)),
    ],
)
def test_a_stop_that_is_bytes_ends_it_at_once(words, stops, least, found):
    assert ended(words, stops, least) == found
