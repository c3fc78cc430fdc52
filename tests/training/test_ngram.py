"""The n-gram yardstick against a plain recursive implementation."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import pytest

from fw.training.ngram import bits_per_byte


def by_hand(train: list[str], val: list[str], order: int) -> float:
    """Witten-Bell with dictionaries; 0 is the boundary of a document."""
    followers: dict[bytes, Counter[int]] = defaultdict(Counter)
    for text in train:
        stream = b"\0" * (order - 1) + text.encode() + b"\0"
        for i in range(order - 1, len(stream)):
            for length in range(order):
                followers[stream[i - length : i]][stream[i]] += 1

    def p(byte: int, context: bytes) -> float:
        lower = p(byte, context[1:]) if context else 1 / 256
        seen = followers.get(context)
        if not seen:
            return lower
        return (seen[byte] + len(seen) * lower) / (seen.total() + len(seen))

    bits = 0.0
    for text in val:
        stream = b"\0" * (order - 1) + text.encode() + b"\0"
        bits -= sum(math.log2(p(stream[i], stream[i - order + 1 : i])) for i in range(order - 1, len(stream)))
    return bits / sum(len(text.encode()) for text in val)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_equals_the_recursion(order):
    chance = random.Random(0)
    documents = ["".join(chance.choices("abcde é\n", k=chance.randint(1, 60))) for _ in range(30)]
    assert bits_per_byte(documents[:20], documents[20:], order) == pytest.approx(by_hand(documents[:20], documents[20:], order), rel=1e-12)


def test_longer_contexts_help_on_text_with_structure():
    text = "the cat sat on the mat and the dog sat on the log. " * 20
    rates = [bits_per_byte([text], [text], order) for order in (2, 3, 4)]
    assert rates[0] > rates[1] > rates[2]
