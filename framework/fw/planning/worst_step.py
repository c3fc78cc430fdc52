"""The step of a model that generates that takes most: all that requests may ask for, of as many sequences as there may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from torch import Tensor

from fw.inference.cached import SCORED, Piece
from fw.inference.options import Sampling
from fw.inference.prepare import OverCache, Prepared
from fw.inference.sampling import drawn, gathered, probabilities, to_device
from fw.inference.telling import scores
from fw.kinds.kv_cache import KVCachePlugin, Stretch
from fw.planned import is_gpu
from fw.recipe.inference import InferenceRecipe

TOP = 20
"""Likeliest tokens for each one of a prompt, of which log-probabilities are asked for."""
_SAMPLING = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)


class WorstStep:
    """As many tokens as a step computes, the last ones of as many sequences as there is room for, which have that room from here on.
    Prompts are scored, and each sequence wants its next token, and those after guesses.

    Args:
        prepared: of this rank; ``recipe``, of the first one.
    """

    def __init__(self, prepared: Prepared, recipe: InferenceRecipe) -> None:
        self._prepared, self._options = prepared, recipe.inference
        self.pieces = _pieces(prepared.own, recipe, recipe.inference.speculate)
        self._of_draft = _pieces(prepared.draft, recipe, 0) if prepared.draft is not None else []

    def run(self, first: bool = True) -> None:
        """And on the first rank what follows: the choice of tokens, and while the logits are there the draft's step, or the next one that
        is begun ahead."""
        runner, options = self._prepared.own.runner, self._options
        scored = [replace(piece, score=_scored) for piece in self.pieces] if first else self.pieces
        rows = runner.run(scored)
        if not first:
            return
        tokens_B = _chosen(rows)
        if self._prepared.draft is not None:
            self._prepared.draft.runner.run(self._of_draft)
        elif options.overlap and is_gpu(self._prepared.device) and options.tensor == 1 and not options.speculate:
            following = [Piece(Stretch(p.stretch.sequence, p.stretch.end - 1, 1), (), range(1)) for p in self.pieces]
            _chosen(runner.run(following, tokens_B))


def longest(plugin: KVCachePlugin, most: int, step_tokens: int, room: float) -> int:
    """Tokens of a sequence that has room for so many, up to ``most``."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if plugin.kept_tokens(middle, step_tokens) <= room:
            low = middle
        else:
            high = middle - 1
    return low


def _pieces(of: OverCache, recipe: InferenceRecipe, guesses: int) -> list[Piece]:
    options = recipe.inference
    sequences = min(options.max_sequences, options.step_tokens)
    context = max(1, longest(recipe.kv_cache, of.context, options.sequence_share, of.kv_bytes / of.token_bytes / sequences))
    length = min(max(1, options.step_tokens // sequences), context)
    start = context - length
    begins = [*range(0, start, options.prompt_share), start]
    stretches = [(begin, end) for begin, end in pairwise([*dict.fromkeys(begins), context])]
    pieces: list[Piece] = []
    for number in range(sequences):
        if not all(of.cache.reserve(number, begin, end) for begin, end in stretches):
            of.cache.release(number)
            break
        wanted = range(max(0, length - 1 - guesses), length)
        # As many as are scored at a time; in tiles, those of the last one beside what is wanted of all.
        most = length if options.batch_invariant else max(0, SCORED - number * length)
        scored = range(min(length, most))
        pieces.append(Piece(Stretch(number, start, length), [0] * length, wanted, scored=scored))
    return pieces


def _scored(rows_RV: Tensor) -> None:
    scores(rows_RV, [0] * len(rows_RV), TOP)


def _chosen(rows: Sequence[Tensor]) -> Tensor:
    """Tokens, drawn in all ways; of all sequences alike, and of one otherwise than of the rest, whose logits are copied then."""
    count = len(rows)
    logits_BV, own_AV = gathered([rows_RV[-1] for rows_RV in rows], range(count))
    tokens_B = logits_BV.argmax(-1)
    if count > 1:
        others_G = to_device(range(1, count), logits_BV.device)
        tokens_B[others_G] = drawn(probabilities(logits_BV[others_G], _SAMPLING), [0.5] * (count - 1))
        del others_G
    tokens_B = drawn(probabilities(logits_BV, _SAMPLING), [0.5] * count)
    del own_AV  # is there while tokens are drawn
    return tokens_B
