"""Guesses of what comes next, which a step checks all at once: by what followed the same tokens before (prompt lookup decoding,
Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).

A guess costs a row of the step; a right one saves a step. Each token is chosen as if there were no guess, and the guess is kept if it is
that token: what is generated is what would have been.
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST, _SHORTEST = 3, 2
"""Tokens that must be the same."""


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
