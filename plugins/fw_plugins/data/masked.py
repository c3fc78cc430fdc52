"""Token ids of records on disk, with what of them is to be learnt; each record a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from fw.api import IGNORED, Sample

IDS, LEARNT, SIZES = "ids", "learnt", "sizes"
_AT_ONCE = 1 << 16
"""Records whose targets are counted together."""


class MaskedWriter:
    """Writes records one after another.

    Attributes:
        records, tokens, targets: written so far; a target is a token that is learnt, of which a record's first is none.
    """

    def __init__(self, directory: Path, split: str, dtype: str) -> None:
        self.records = self.tokens = self.targets = 0
        self._dtype = dtype
        self._files: dict[str, BinaryIO] = {name: (directory / f"{split}.{name}").open("wb") for name in (IDS, LEARNT, SIZES)}

    def write(self, ids: Sequence[int], learnt: Sequence[int]) -> None:
        """One record; ``learnt``: 1 for a token that is, else 0."""
        self._files[IDS].write(np.array(ids, self._dtype).tobytes())
        self._files[LEARNT].write(np.array(learnt, np.uint8).tobytes())
        self._files[SIZES].write(np.int64(len(ids)).astype("<i8").tobytes())
        self.records, self.tokens = self.records + 1, self.tokens + len(ids)
        self.targets += sum(learnt[1:])

    def __enter__(self) -> MaskedWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


class MaskedRecords:
    """The records of a split. One of more than ``most`` targets is cut: what is behind them is left out."""

    def __init__(self, directory: Path, split: str, dtype: str, most: int) -> None:
        self._ids, self._learnt = _mapped(directory / f"{split}.{IDS}", dtype), _mapped(directory / f"{split}.{LEARNT}", np.uint8)
        sizes = sizes_in(directory, split)
        self._starts = sizes.cumsum() - sizes
        self._lengths = np.minimum(sizes - 1, most)

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
        end = start + int(self._lengths[index]) + 1
        ids = torch.from_numpy(self._ids[start:end].astype(np.int64))
        learnt = torch.from_numpy(self._learnt[start + 1 : end].astype(np.bool_))
        return {"input_ids": ids[:-1], "labels": torch.where(learnt, ids[1:], IGNORED)}

    def learnt(self) -> Iterator[list[int]]:
        """Of each sample what is learnt."""
        for index in range(len(self)):
            labels = self[index]["labels"]
            yield labels[labels != IGNORED].tolist()

    def targets_of(self, lengths_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens ``[N]`` that are learnt among so many positions of each sample."""
        counts_N = np.zeros(len(lengths_N), np.int64)
        for first in range(0, len(lengths_N), _AT_ONCE):
            these = slice(first, first + _AT_ONCE)
            begins, lengths = self._starts[these] + 1, lengths_N[these]
            # One more, since a stretch may end where the file does.
            learnt = np.append(self._learnt[begins[0] : begins[-1] + lengths[-1]], np.uint8(0))
            stretches = np.stack([begins, begins + lengths], 1).ravel() - begins[0]
            counts_N[these] = np.add.reduceat(learnt, stretches, dtype=np.int64)[::2] * (lengths > 0)  # of none it gives the next token
        return counts_N

    @cached_property
    def _targets(self) -> NDArray[np.int64]:
        return self.targets_of(self._lengths)

    @property
    def targets(self) -> int:
        """Tokens that are learnt."""
        return int(self._targets.sum())

    @property
    def without_targets(self) -> int:
        """Samples of which nothing is learnt: what was to be is behind the cut."""
        return int((self._targets == 0).sum())


class PairedRecords:
    """Records of two splits in pairs, each pair a sample of two segments. One that is longer than ``most`` is cut at the ends, first of the
    longer one."""

    def __init__(self, directory: Path, splits: tuple[str, str], dtype: str, most: int) -> None:
        self._pair = [MaskedRecords(directory, split, dtype, most) for split in splits]
        first_N, second_N = (records.lengths for records in self._pair)
        half = most // 2
        self._first = np.minimum(first_N, np.maximum(half, most - second_N))
        self._second = np.minimum(second_N, most - self._first)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of each sample."""
        return self._first + self._second

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int) -> Sample:
        parts = []
        for number, (records, lengths) in enumerate(zip(self._pair, (self._first, self._second), strict=True), start=1):
            length = int(lengths[index]) if 0 <= index < len(self) else 0
            part = {key: value[:length] for key, value in records[index].items()}
            parts.append({**part, "segments": torch.full((length,), number)})
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def learnt(self) -> Iterator[list[int]]:
        """Of each sample what is learnt of the first."""
        return self._pair[0].learnt()

    @cached_property
    def _targets(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        first, second = self._pair
        return first.targets_of(self._first), second.targets_of(self._second)

    @property
    def targets(self) -> int:
        """Tokens that are learnt, of both."""
        return int(sum(counts_N.sum() for counts_N in self._targets))

    @property
    def without_targets(self) -> int:
        """Pairs of which nothing of the first is learnt, so that they are none."""
        return int((self._targets[0] == 0).sum())


def sizes_in(directory: Path, split: str) -> NDArray[np.int64]:
    """Ids of each record of a split."""
    return np.fromfile(directory / f"{split}.{SIZES}", "<i8")


def _mapped(file: Path, dtype: Any) -> NDArray[Any]:
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)
