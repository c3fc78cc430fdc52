"""A run's samples on their way to batches: packed or padded, in which order, in which micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from fw.errors import UserError
from fw.kinds.data import Corpus, Rows, Samples, Say, VaryingSamples
from fw.recipe import Recipe
from fw.training.micro_batches import Limit, Padding, divide
from fw.training.order import StepOrder
from fw.training.packing import PackedRows

_FEW_SHAPES = 64
"""Rows of varying length are padded to a multiple of this, so that kernels and torch.compile meet few shapes."""


class Plan(NamedTuple):
    """A batch before it is read.

    Attributes:
        micro_batches: indices of the samples in each, of this replica; an empty one is one in which nothing is predicted.
        lengths: of the sequences of all replicas' batches, without padding, each of which sees itself only.
    """

    micro_batches: list[list[int]]
    lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """The rows that training or validation takes.

    Attributes:
        lengths: of each row ``[N]``, without padding unless they are packed.
        padding: None where all rows have one length.
    """

    samples: Samples
    lengths: NDArray[np.int64]
    padding: Padding | None

    def padded(self, indices: NDArray[np.int64] | slice) -> NDArray[np.int64]:
        """Lengths that these rows have by themselves."""
        lengths = self.lengths[indices]
        return lengths if self.padding is None else self.padding.padded(lengths)

    def sequences(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths of what is in these rows and sees itself only."""
        if isinstance(self.samples, PackedRows):
            return np.concatenate([self.samples.lengths_in(int(row)) for row in indices])
        return self.lengths[indices]


class TrainPlans(Sampler[Plan]):
    """A plan per optimizer step, for one replica; without end."""

    def __init__(self, source: Source, order: StepOrder, limit: Limit, replica: int, replicas: int) -> None:
        self._source, self._order, self._limit = source, order, limit
        self._replica, self._replicas = replica, replicas

    def __iter__(self) -> Iterator[Plan]:
        for indices in self._order:
            mine = divide(self._source.padded(indices), self._limit, self._replicas)[self._replica]
            yield Plan([indices[group].tolist() for group in mine], self._source.sequences(indices))


class ValidationPlans(Sampler[Plan]):
    """All samples once, a micro-batch at a time; each replica has equally many."""

    def __init__(self, source: Source, limit: Limit, replica: int, replicas: int) -> None:
        self._mine = divide(source.padded(slice(None)), limit, replicas)[replica]

    def __len__(self) -> int:
        return len(self._mine)

    def __iter__(self) -> Iterator[Plan]:
        for group in self._mine:
            yield Plan([group.tolist()], np.zeros(0, np.int64))  # nothing is counted there


@dataclass(frozen=True)
class Batches:
    """What training and validation read, the same on every rank."""

    recipe: Recipe
    train: Source
    val: Source
    rows: Rows

    def train_plans(self, samples_seen: int, replica: int) -> TrainPlans:
        """From a position on."""
        train = self.recipe.train
        order = StepOrder(
            len(self.train.samples), train.global_batch_size, train.seed, samples_seen, self.train.lengths, train.length_bucketing
        )
        return TrainPlans(self.train, order, self._limit, replica, self.recipe.replicas)

    def val_plans(self, replica: int) -> ValidationPlans:
        """Of one pass."""
        return ValidationPlans(self.val, self._limit, replica, self.recipe.replicas)

    @property
    def _limit(self) -> Limit:
        tokens = self.recipe.train.max_tokens_per_batch
        return Limit(rows=self.recipe.micro_batch_size) if tokens is None else Limit(tokens=tokens)


def arrange(recipe: Recipe, corpus: Corpus, say: Say) -> Batches:
    """Pack where that is asked for, and find out what batches will be like.

    Raises:
        UserError: an option that is for samples of varying length, and these have one.
    """
    train = recipe.train
    for option in ("packing", "length_bucketing"):
        if getattr(train, option) and not isinstance(corpus.train, VaryingSamples):
            raise UserError(
                f"{recipe.config.origin(('train', option))}: train.{option}: the samples of data={recipe.names['data'][0]} all have"
                " train.sequence_length tokens already; leave it out, or let documents be samples (data=text: data.samples=documents)"
            )
    multiple = math.lcm(_FEW_SHAPES, recipe.sharding.length_multiple(recipe.mesh_shape))
    padding = Padding(multiple, train.sequence_length)
    sources = [_source(samples, train.sequence_length, padding, train.packing) for samples in (corpus.train, corpus.val)]
    if train.packing:
        say(f"batches: training {_told(sources[0], train.sequence_length)}; validation {_told(sources[1], train.sequence_length)}")
    varies = isinstance(corpus.train, VaryingSamples)
    rows = Rows(vary=varies and not train.packing, segments=varies or "segments" in corpus.train[0])
    return Batches(recipe, sources[0], sources[1], rows)


def _source(samples: Samples, length: int, padding: Padding, packing: bool) -> Source:
    if not isinstance(samples, VaryingSamples):
        return Source(samples, _all(length, len(samples)), None)
    if not packing:
        return Source(samples, samples.lengths, padding)
    packed = PackedRows(samples, length)
    return Source(packed, _all(length, len(packed)), None)


def _all(length: int, number: int) -> NDArray[np.int64]:
    """An array that takes no memory."""
    return np.broadcast_to(np.int64(length), (number,))


def _told(source: Source, length: int) -> str:
    rows = source.samples
    assert isinstance(rows, PackedRows)
    return f"{rows.packed:,} samples in {len(rows):,} rows of {length} tokens, {rows.padding:.1%} of them padding"
