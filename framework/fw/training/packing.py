"""Samples of varying length put together into rows of one length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fw.kinds.data import IGNORED, Sample, VaryingSamples


def pad(sample: Sample, length: int) -> Sample:
    """The sample with so many positions; what is added predicts nothing and belongs to no segment."""
    missing = length - len(sample["labels"])
    return {k: torch.nn.functional.pad(v, (0, missing), value=IGNORED if k == "labels" else 0) for k, v in sample.items()}


def assign(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The number of the row that each sample goes to, ``[N]``, rows counted from 0: best fit, the longest samples first.

    At most 11/9 times the fewest rows possible, and 4 more (Johnson et al. 1974, https://doi.org/10.1137/0203025), and hardly more than
    those where there are many short samples. All samples of one length are placed together: of the rows that have the least
    room that suffices, each takes as many as it holds, which is what placing one after another would do.

    Args:
        lengths: from 1 to ``capacity``.
    """
    row_N = np.empty(len(lengths), np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    bounds = np.flatnonzero(np.diff(lengths[by_length], prepend=-1, append=-1))
    rows = 0
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room they have left
    has_rows = bytearray(capacity + 1)  # whose find() is the search

    def leave(room: int, given: Sequence[int]) -> None:
        if given and room:
            open_rows[room].extend(given)
            has_rows[room] = 1

    for first, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        length = int(lengths[by_length[first]])
        while first < end:
            room = has_rows.find(1, length)
            if room < 0:
                room, each = capacity, capacity // length
                wanted = -(-(end - first) // each)
                taken: Sequence[int] = range(rows, rows + wanted)
                rows += wanted
            else:
                each, there = room // length, open_rows[room]
                wanted = min(-(-(end - first) // each), len(there))
                taken = there[-wanted:]
                del there[-wanted:]
                has_rows[room] = bool(there)
            placed = min(wanted * each, end - first)
            row_N[by_length[first : first + placed]] = np.repeat(np.asarray(taken), each)[:placed]
            in_last = placed - (wanted - 1) * each
            leave(room - each * length, taken[:-1])
            leave(room - in_last * length, taken[-1:])
            first += placed
    return row_N


class PackedRows:
    """Rows of ``length`` positions, each of several samples and some padding; a sample is whole in one row, and a segment of its own there.

    A function of lengths alone, so the same on every rank. Within a row samples stand in the order they have in the data.
    """

    def __init__(self, samples: VaryingSamples, length: int) -> None:
        self._samples, self._length = samples, length
        self._lengths = samples.lengths
        row_N = assign(self._lengths, length)
        self._order = np.argsort(row_N, kind="stable")
        self._bounds = np.flatnonzero(np.diff(row_N[self._order], prepend=-1, append=-1))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def packed(self) -> int:
        """How many samples the rows hold."""
        return len(self._order)

    @property
    def padding(self) -> float:
        """The share of all positions that is padding."""
        return 1 - float(self._lengths.sum()) / max(1, len(self) * self._length)

    def members(self, row: int) -> NDArray[np.int64]:
        """Indices of the samples in a row."""
        return self._order[self._bounds[row] : self._bounds[row + 1]]

    def lengths_in(self, row: int) -> NDArray[np.int64]:
        """Lengths of the samples in a row."""
        return self._lengths[self.members(row)]

    def __getitem__(self, row: int) -> Sample:
        if not 0 <= row < len(self):
            raise IndexError(row)
        parts: list[Sample] = []
        numbered = 0
        for index in self.members(row).tolist():
            part = self._samples[index]
            segments = part.get("segments", torch.ones_like(part["labels"]))
            parts.append({**part, "segments": torch.where(segments > 0, segments + numbered, 0)})
            numbered += int(segments.max())
        return pad({key: torch.cat([part[key] for part in parts]) for key in parts[0]}, self._length)
