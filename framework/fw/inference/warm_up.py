"""What the first requests would wait for on a GPU, before there are any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from fw.inference.cached import Piece, Runner
from fw.inference.sampling import gathered
from fw.kinds.kv_cache import KVCache, Stretch

_PROMPT = 64
_TIMES = 3
"""A step is Python's, then recorded, then compared with Python."""


def warm_up(runner: Runner, cache: KVCache, most: int, sizes: Sequence[int]) -> None:
    """Compile kernels, load libraries, and record steps of one token each.

    Args:
        cache: of the runner; nothing stays in it.
        most: tokens that a sequence can have.
        sizes: numbers of sequences.
    """
    _step(runner, cache, [min(_PROMPT, most)])
    for count in sorted(sizes, reverse=True):  # recordings share memory, of which the largest takes all
        for _ in range(_TIMES):
            if not _step(runner, cache, [1] * count):
                break


def _step(runner: Runner, cache: KVCache, lengths: Sequence[int]) -> bool:
    """Of sequences of its own; False where there is no room for them."""
    with _sequences(cache, lengths) as pieces:
        if not pieces:
            return False
        rows = runner.run(pieces)
        logits_BV, logprobs_BV = gathered([rows_RV[-1] for rows_RV in rows], range(len(rows)))
        assert logprobs_BV is not None
        logits_BV.argmax(-1).tolist()
    return True


def record(runner: Runner, cache: KVCache, sizes: Sequence[int]) -> None:
    """What stays of warming up for these numbers of sequences: for a plan, once the largest has been warmed up."""
    for count in sorted(sizes, reverse=True):
        with _sequences(cache, [1] * count) as pieces, torch.inference_mode():
            if pieces and runner.steady is not None:
                runner.steady.record(pieces)


@contextmanager
def _sequences(cache: KVCache, lengths: Sequence[int]) -> Iterator[list[Piece]]:
    """Of so many tokens each, while it is entered; none where there is no room for them."""
    stretches = [Stretch(-1 - number, 0, length) for number, length in enumerate(lengths)]
    try:
        room = all(cache.reserve(stretch.sequence, 0, stretch.end) for stretch in stretches)
        last = [Piece(stretch, [0] * stretch.length, range(stretch.length - 1, stretch.length)) for stretch in stretches]
        yield last if room else []
    finally:
        for stretch in stretches:
            cache.release(stretch.sequence)
