"""Token ids on disk, read as blocks of one length or as documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fw.api import IGNORED, Sample


class TokenFile:
    """A memory-mapped stream of ids, ``EOS document EOS document EOS``."""

    def __init__(self, file: Path, dtype: str) -> None:
        self._ids = np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)

    @property
    def tokens(self) -> int:
        """Ids in the stream."""
        return len(self._ids)

    def documents(self, separator: int) -> Iterator[list[int]]:
        """What stands between two separators."""
        ends = np.flatnonzero(np.asarray(self._ids) == separator)
        for start, end in zip(ends[:-1], ends[1:], strict=True):
            yield self._ids[start + 1 : end].tolist()


class TokenBlocks(TokenFile):
    """Consecutive blocks of a memory-mapped stream of ids, each predicting its tokens shifted by one: every id but the first is a target.

    The tail that fills no block is dropped, or padded with ignored labels where ``keep_tail`` is set. With a ``separator``, the id that
    stands before each document, samples have ``segments``; the separator belongs to the document that follows it.
    """

    def __init__(self, file: Path, dtype: str, length: int, keep_tail: bool, separator: int | None = None) -> None:
        super().__init__(file, dtype)
        self._length = length
        self._separator = separator
        targets = max(0, len(self._ids) - 1)
        self._blocks = -(-targets // length) if keep_tail else targets // length

    def __len__(self) -> int:
        return self._blocks

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._blocks:
            raise IndexError(index)
        start = index * self._length
        ids = torch.from_numpy(self._ids[start : start + self._length + 1].astype(np.int64))
        missing = self._length + 1 - len(ids)
        labels = torch.nn.functional.pad(ids[1:], (0, missing), value=IGNORED)
        inputs = torch.nn.functional.pad(ids[:-1], (0, missing), value=0)
        sample = {"input_ids": inputs, "labels": labels}
        if self._separator is not None:
            begins = (ids[:-1] == self._separator).long()
            begins[0] = 1  # also where the block cuts into a document
            sample["segments"] = torch.nn.functional.pad(begins.cumsum(0), (0, missing), value=0)
        return sample


class TokenDocuments(TokenFile):
    """The documents of a stream, each a sample: the separator before it is its first input, that after it its last target.

    A document with more than ``most`` targets is cut into samples of ``most`` and the rest, each of which begins with the last target of
    the one before it: every id but the stream's first is a target once.

    Args:
        sizes: a file of the documents' numbers of ids, little-endian int64, without separators.
    """

    def __init__(self, file: Path, dtype: str, sizes: Path, most: int) -> None:
        super().__init__(file, dtype)
        targets = np.fromfile(sizes, "<i8") + 1
        pieces = -(-targets // most)
        document = np.repeat(np.arange(len(targets)), pieces)
        first = (np.arange(len(document)) - (pieces.cumsum() - pieces)[document]) * most
        self._starts = (targets.cumsum() - targets)[document] + first
        self._lengths = np.minimum(targets[document] - first, most)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of each sample."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = int(self._starts[index])
        ids = torch.from_numpy(self._ids[start : start + int(self._lengths[index]) + 1].astype(np.int64))
        return {"input_ids": ids[:-1], "labels": ids[1:]}
