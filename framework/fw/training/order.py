"""In which order samples are seen: a pure function of seed and position, so that a run resumes on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray


class StepOrder:
    """For each optimizer step, the indices of its global batch ``[global_batch_size]``; without end.

    Samples are numbered through all epochs; an epoch is a permutation seeded by seed and epoch. Each step takes the next
    ``global_batch_size`` numbers from ``samples_seen`` on: the global batch does not depend on the number of ranks, and how many samples
    were seen is all that a resume needs to know.

    Args:
        lengths: of the samples, where ``bucketing`` needs them.
        bucketing: steps within which samples change places so that a step has samples of similar length; 0 for none. The samples of
            so many steps are sorted by length, and then the steps shuffled. Samples stay in their epoch.
    """

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        seed: int,
        samples_seen: int,
        lengths: NDArray[np.int64] | None = None,
        bucketing: int = 0,
    ) -> None:
        self._samples, self._batch, self._seed, self._seen = samples, global_batch_size, seed, samples_seen
        self._lengths, self._bucketing = lengths, bucketing
        self._epoch, self._permutation = -1, np.empty(0, np.int64)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        first = self._seen
        while True:
            parts: list[NDArray[np.int64]] = []
            number, end = first, first + self._batch
            while number < end:
                epoch, position = divmod(number, self._samples)
                parts.append(self._of_epoch(epoch)[position : position + end - number])
                number += len(parts[-1])
            yield np.concatenate(parts)
            first = end

    def _of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            self._epoch, self._permutation = epoch, torch.randperm(self._samples, generator=generator).numpy()
            if self._bucketing:
                self._permutation = self._bucketed(self._permutation, epoch * self._samples, generator)
        return self._permutation

    def _bucketed(self, permutation: NDArray[np.int64], first: int, generator: torch.Generator) -> NDArray[np.int64]:
        """The permutation of an epoch whose first sample has the number ``first``, sorted inside windows."""
        assert self._lengths is not None
        batch, window = self._batch, self._batch * self._bucketing
        sorted_ = permutation[np.lexsort((self._lengths[permutation], (first + np.arange(self._samples)) // window))]
        # Steps that lie in this epoch as a whole change places with others of their window.
        from_step, to_step = -(-first // batch), (first + self._samples) // batch
        if from_step < to_step:
            chance = torch.rand(to_step - from_step, generator=generator, dtype=torch.float64).numpy()
            shuffled = np.lexsort((chance, np.arange(from_step, to_step) // self._bucketing))
            whole = sorted_[from_step * batch - first : to_step * batch - first].reshape(-1, batch)
            sorted_[from_step * batch - first : to_step * batch - first] = whole[shuffled].ravel()
        return sorted_
