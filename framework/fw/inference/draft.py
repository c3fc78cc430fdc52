"""Guesses by a smaller model (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192), which are its likeliest tokens.

What is generated does not depend on them: a token is chosen as it would have been, by the same numbers drawn. So one that is drawn from
what the model gives is found by the draft as often as it is the likeliest there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fw.inference.cached import Piece, Runner
from fw.inference.sequence import Answer
from fw.inference.speculation import Guesser
from fw.kinds.kv_cache import KVCache, Stretch


@dataclass
class _Written:
    """Tokens that are in the cache, guesses among them; the first are the answer's for sure."""

    tokens: list[int]
    sure: int

    def same(self, tokens: Sequence[int]) -> int:
        """How many are the answer's, but for its last one."""
        most = min(len(self.tokens), len(tokens) - 1)
        same = min(self.sure, most)
        while same < most and self.tokens[same] == tokens[same]:
            same += 1
        return same


class DraftModel(Guesser):
    """Guesses for all answers at once, a token of each in a step of its own.

    Args:
        runner: of the draft, over ``cache``.
        context: tokens of the longest sequence that it can go on from.
        vocab_size: of the model that it guesses for; ``own_vocab_size``, of the draft, which may be smaller or larger.
        step_tokens: most that it computes at once; ``prompt_share``, of one answer.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        context: int,
        vocab_size: int,
        own_vocab_size: int,
        step_tokens: int,
        prompt_share: int,
    ) -> None:
        self.runner, self.cache = runner, cache
        self._context, self._step_tokens, self._prompt_share = context, step_tokens, prompt_share
        self._vocab_size, self._own_vocab_size = vocab_size, own_vocab_size
        self._written: dict[int, _Written] = {}
        self._strange: set[int] = set()
        """Answers with tokens that the draft does not have, by their numbers."""

    def guess(self, answers: Sequence[Answer], most: Sequence[int]) -> list[list[int]]:
        """None for those whose tokens it has not all computed yet, which it goes on with; nor where there is no room, or a token that it
        does not have."""
        guessed: dict[Answer, list[int]] = {answer: [] for answer in answers}
        here = [(answer, n) for answer, n in zip(answers, most, strict=True) if answer.number not in self._strange]
        allowed = {answer: min(n, self._context - len(answer.tokens)) for answer, n in here}
        going = self._caught_up({answer: n for answer, n in allowed.items() if n > 0})
        while going:
            for answer, logits_V in going:
                guessed[answer].append(int(logits_V.argmax()))
            further = [answer for answer, _ in going if len(guessed[answer]) < allowed[answer] and guessed[answer][-1] < self._vocab_size]
            going = self._run([(answer, self._next(answer, guessed[answer][-1])) for answer in further])
        return [[token for token in guessed[answer] if token < self._vocab_size] for answer in answers]

    def forget(self, answer: Answer) -> None:
        """Its keys and values."""
        self._strange.discard(answer.number)
        if self._written.pop(answer.number, None) is not None:
            self.cache.release(answer.number)

    def _caught_up(self, allowed: Mapping[Answer, int]) -> list[tuple[Answer, Tensor]]:
        """Compute of each what it has that is not in the cache; logits after the last token of those that have no more."""
        left, behind = self._step_tokens, []
        for answer, guesses in allowed.items():
            if left and (piece := self._behind(answer, min(left, self._prompt_share), guesses)) is not None:
                left -= piece.stretch.length
                behind.append((answer, piece))
        found = self._run(behind)
        for answer, piece in behind:
            self.cache.written(answer.number, answer.tokens, piece.stretch.end)
        return found

    def _behind(self, answer: Answer, most: int, guesses: int) -> Piece | None:
        """The first of its tokens that are to be computed; with the last of them there is room for guesses. None where there is no room,
        or a token among them that the draft does not have."""
        tokens = answer.tokens
        if (written := self._written.get(answer.number)) is None:
            known = self.cache.reuse(answer.number, tokens)
            written = self._written[answer.number] = _Written(tokens[:known], known)
        begin = written.same(tokens)
        end = min(len(tokens), begin + most)
        if max(tokens[begin:end]) >= self._own_vocab_size:
            self.forget(answer)
            self._strange.add(answer.number)
            return None
        # All at once: what a guess needs no more, the token that comes instead of it may.
        if not self.cache.reserve(answer.number, begin, end + guesses - 1 if end == len(tokens) else end):
            self.forget(answer)
            return None
        written.tokens[begin:] = tokens[begin:end]
        written.sure = end
        length = end - begin
        wanted = range(length - 1, length) if end == len(tokens) else range(0)
        return Piece(Stretch(answer.number, begin, length), tokens[begin:end], wanted)

    def _next(self, answer: Answer, token: int) -> Piece:
        """One that was guessed."""
        written = self._written[answer.number].tokens
        written.append(token)
        return Piece(Stretch(answer.number, len(written) - 1, 1), [token], range(1))

    def _run(self, pieces: Sequence[tuple[Answer, Piece]]) -> list[tuple[Answer, Tensor]]:
        """Logits of the last token, of the pieces that want them."""
        if not pieces:
            return []
        rows = self.runner.run([piece for _, piece in pieces])
        return [(answer, rows_RV[-1]) for (answer, piece), rows_RV in zip(pieces, rows, strict=True) if piece.wanted]
