"""Guesses of what comes next, which a step checks all at once: by what followed the same tokens before (prompt lookup decoding,
Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).

A guess costs a row of the step; a right one saves a step. Each token is chosen as if there were no guess, and the guess is kept if it is
that token: what is generated is what would have been.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from fw.inference.sequence import Answer

_LONGEST, _SHORTEST = 3, 2
"""Tokens that must be the same."""


class Guesser(ABC):
    """Knows answers by their numbers."""

    @abstractmethod
    def guess(self, answers: Sequence[Answer], most: Sequence[int]) -> list[list[int]]:
        """Of each what may come next, and no more than so many."""

    @abstractmethod
    def forget(self, answer: Answer) -> None:
        """It needs no guesses any more. One that is not known is none."""


class PromptLookup(Guesser):
    """By what each answer has, its prompt included."""

    def __init__(self) -> None:
        self._of: dict[int, Lookup] = {}

    def guess(self, answers: Sequence[Answer], most: Sequence[int]) -> list[list[int]]:
        """What followed the same tokens."""
        return [self._of.setdefault(answer.number, Lookup()).guess(answer.tokens, n) for answer, n in zip(answers, most, strict=True)]

    def forget(self, answer: Answer) -> None:
        """Where its tokens were."""
        self._of.pop(answer.number, None)


class Lookup:
    """Of one sequence, which only grows."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known = 0

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """What followed the last tokens when they were there last; empty where they never were."""
        for end in range(max(self._known, _SHORTEST), len(tokens)):  # but for the last ones, which nothing follows yet
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._known = len(tokens)
        for size in range(min(_LONGEST, len(tokens)), _SHORTEST - 1, -1):
            if (at := self._after.get(tuple(tokens[-size:]))) is not None:
                found = list(tokens[at : at + most])
                while len(found) < most:  # where these reach the end, it goes round
                    found.append(found[len(found) - (len(tokens) - at)])
                return found
        return []
