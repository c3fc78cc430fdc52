"""Token ids on disk, read as blocks of one length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from fw.kinds.data import IGNORED, Sample


class TokenBlocks:
    """Consecutive blocks of a memory-mapped stream of ids, each predicting its tokens shifted by one: every id but the first is a target.

    The tail that fills no block is dropped, or padded with ignored labels where ``keep_tail`` is set. With a ``separator``, the id that
    stands before each document, samples have ``segments``; the separator belongs to the document that follows it.
    """

    def __init__(self, file: Path, dtype: str, length: int, keep_tail: bool, separator: int | None = None) -> None:
        self._ids = np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)
        self._length = length
        self._separator = separator
        targets = max(0, len(self._ids) - 1)
        self._blocks = -(-targets // length) if keep_tail else targets // length

    @property
    def tokens(self) -> int:
        """Ids in the stream."""
        return len(self._ids)

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

    def documents(self, separator: int) -> Iterator[list[int]]:
        """The stream's documents: what stands between two separators."""
        ends = np.flatnonzero(np.asarray(self._ids) == separator)
        for start, end in zip(ends[:-1], ends[1:], strict=True):
            yield self._ids[start + 1 : end].tolist()
