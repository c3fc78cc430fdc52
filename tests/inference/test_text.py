"""The text of an answer up to what ends it, against looking for that in the whole."""

from __future__ import annotations

import random

import pytest

import tokens
from fw.inference.text import AnswerText

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
    assert given("a. b. c. d", ["."], least=5)[0] == ["a", ".", " ", "b", "", ""]
    assert given("a. b. c. d", ["."], least=5)[1] == "."


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
