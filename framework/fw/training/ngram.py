"""Byte n-gram models, fitted to the training text, as a yardstick for a language model."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Array = NDArray[np.int64]


def bits_per_byte(train: Sequence[str], val: Sequence[str], order: int) -> float:
    """Bits per byte that an interpolated ``order``-gram model of bytes needs for ``val``.

    Witten-Bell smoothing (Bell, Cleary & Witten 1990; as in PPM-C): with c(h) occurrences of a context h and t(h) distinct
    successors, p(w|h) = (c(hw) + t(h) · p(w|h')) / (c(h) + t(h)), where h' drops the oldest byte; at the bottom all 256 bytes are
    equally likely. The end of a document is a byte to predict as well (as it is a token for the language model), and contexts do not
    reach across it.

    Args:
        train: documents the counts come from.
        val: documents that are scored; their bytes are what the bits are divided by.
        order: bytes a probability depends on, the predicted one included: 2 is a bigram model.
    """
    train_bytes, val_bytes = _stream(train, order), _stream(val, order)
    predicted = order - 1 + np.flatnonzero(_is_target(val_bytes, order))
    probability = np.full(len(predicted), 1 / 256)
    targets = order - 1 + np.flatnonzero(_is_target(train_bytes, order))
    for length in range(order):  # length of the context
        contexts, grams = _keys(train_bytes, targets, length)
        gram_keys, gram_counts = np.unique(grams, return_counts=True)
        context_keys, context_counts = np.unique(contexts, return_counts=True)
        distinct = np.unique(gram_keys >> 8, return_counts=True)[1]
        val_contexts, val_grams = _keys(val_bytes, predicted, length)
        c_h, t_h = _look_up(context_keys, context_counts, val_contexts), _look_up(context_keys, distinct, val_contexts)
        c_hw = _look_up(gram_keys, gram_counts, val_grams)
        seen = c_h > 0
        probability[seen] = (c_hw[seen] + t_h[seen] * probability[seen]) / (c_h[seen] + t_h[seen])
    text_bytes = sum(len(text.encode()) for text in val)
    return float(-np.log2(probability).sum() / text_bytes) if text_bytes else math.nan


def _stream(texts: Sequence[str], order: int) -> _Array:
    """Documents, each preceded by ``order - 1`` zero bytes and ended by one: the boundary as context, then as target."""
    padding = b"\0" * (order - 1)
    joined = b"".join(padding + text.encode().replace(b"\0", b" ") + b"\0" for text in texts)
    return np.frombuffer(joined, np.uint8).astype(np.int64)


def _is_target(stream: _Array, order: int) -> NDArray[np.bool_]:
    """For each position from ``order - 1`` on, whether it is a byte of a document or its end, not padding."""
    here, before = stream[order - 1 :], stream[order - 2 : -1]
    return (here != 0) | (before != 0)


def _keys(stream: _Array, positions: _Array, length: int) -> tuple[_Array, _Array]:
    """The context of ``length`` bytes before each position as one integer, and the same with the byte itself appended."""
    context = np.zeros(len(positions), np.int64)
    for back in range(length, 0, -1):
        context = (context << 8) | stream[positions - back]
    return context, (context << 8) | stream[positions]


def _look_up(keys: _Array, values: _Array, wanted: _Array) -> _Array:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0)
