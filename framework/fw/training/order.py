"""In which order samples are seen, by which rank: a pure function of seed and position, so that a run resumes on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class StepOrder(Sampler[list[int]]):
    """For each optimizer step, the indices of this rank's share of the global batch; without end.

    Samples are numbered through all epochs; an epoch is a permutation seeded by seed and epoch. Each step takes the next
    ``global_batch_size`` numbers from ``samples_seen`` on, of which each rank takes a consecutive part: the global batch does not depend
    on the number of ranks, and how many samples were seen is all that a resume needs to know.
    """

    def __init__(self, samples: int, global_batch_size: int, seed: int, rank: int, ranks: int, samples_seen: int) -> None:
        self._samples, self._batch, self._seed = samples, global_batch_size, seed
        self._rank, self._ranks, self._seen = rank, ranks, samples_seen
        self._epoch, self._permutation = -1, torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        share = self._batch // self._ranks
        first = self._seen + self._rank * share
        while True:
            yield [self._index(number) for number in range(first, first + share)]
            first += self._batch

    def _index(self, number: int) -> int:
        epoch, position = divmod(number, self._samples)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            self._epoch, self._permutation = epoch, torch.randperm(self._samples, generator=generator)
        return int(self._permutation[position])


class RankedBatches(Sampler[list[int]]):
    """All samples once in order, in batches dealt out to ranks; each rank has equally many, the last ones empty (-1) if need be."""

    def __init__(self, samples: int, batch_size: int, rank: int, ranks: int) -> None:
        self._samples, self._batch, self._rank, self._ranks = samples, batch_size, rank, ranks

    def __len__(self) -> int:
        return -(-self._samples // (self._batch * self._ranks))

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self)):
            first = (number * self._ranks + self._rank) * self._batch
            yield [i if i < self._samples else -1 for i in range(first, first + self._batch)]
