"""Random token ids, for plans, profiles and benchmarks where text does not matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend, models, pre_tokenizers

from fw.api import Corpus, DataPlugin, Sample, Samples, Say, Tokenizer, UserError

_TRAIN, _VAL, _TRAIN_LENGTHS, _VAL_LENGTHS = range(4)
"""Keys of streams that have nothing to do with each other."""
_UNKNOWN = "<unk>"


@dataclass
class SyntheticConfig:
    """How many ids there are, and how they lie in samples."""

    vocab_size: int = 32000
    """Ids of the tokenizer; the last one stands for what is no number, and is never drawn. Embedding and logits grow in proportion."""
    samples: int = 1_000_000
    """Training samples of an epoch. None takes memory, except 8 bytes each for its length where lengths vary."""
    val_samples: int = 16
    """Validation samples."""
    min_length: int | None = None
    """Each sample is a document, of this many tokens to train.sequence_length, all lengths equally likely (train.packing,
    train.max_tokens_per_batch, train.length_bucketing). Empty for samples that all have train.sequence_length tokens."""

    def __post_init__(self) -> None:
        if not 2 <= self.vocab_size <= 1 << 32:
            raise UserError(f"data.vocab_size: {self.vocab_size} is not from 2 to 2^32; one id is for what is no number")
        for name in ("samples", "val_samples", "min_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"data.{name}: {value} is too small; the least is 1")


class SyntheticData(DataPlugin):
    """Random token ids: no text, no files, nothing to prepare. There is nothing to learn: the loss stays at the logarithm of vocab_size."""

    api = 1
    Config = SyntheticConfig
    config: SyntheticConfig

    def prepare(self, say: Say) -> None:
        """Nothing: a sample is a function of its number."""

    def open(self, sequence_length: int) -> Corpus:
        """The ids of any sample, drawn when it is asked for.

        Raises:
            UserError: ``min_length`` is above ``sequence_length``.
        """
        c = self.config
        if c.min_length is not None and c.min_length > sequence_length:
            raise UserError(
                f"data.min_length: {c.min_length} is more than train.sequence_length {sequence_length}; give that many or fewer, or"
                " leave it out for samples of one length"
            )
        tokenizer = number_tokenizer(c.vocab_size)
        train, train_targets = self._samples(_TRAIN, _TRAIN_LENGTHS, c.samples, sequence_length)
        val, val_targets = self._samples(_VAL, _VAL_LENGTHS, c.val_samples, sequence_length)
        val_text = _text(val, tokenizer)
        return Corpus(
            train=train,
            val=val,
            tokenizer=tokenizer,
            fingerprint=f"synthetic-1-{c.vocab_size}-{c.samples}-{c.val_samples}-{c.min_length}",
            # Streams whose first id is no target, as text is.
            train_tokens=train_targets + 1,
            val_tokens=val_targets + 1,
            val_bytes=sum(len(text.encode()) for text in val_text()),
            train_text=_text(train, tokenizer),
            val_text=val_text,
        )

    def _samples(self, key: int, lengths_key: int, number: int, length: int) -> tuple[Samples, int]:
        """Samples of a stream, and how many targets they have."""
        ids = partial(draw, key, self.config.vocab_size - 1)
        if self.config.min_length is None:
            return RandomBlocks(ids, number, length), number * length
        lengths = self.config.min_length + draw(lengths_key, length - self.config.min_length + 1, 0, number)
        return RandomDocuments(ids, lengths, length), int(lengths.sum())


def draw(key: int, below: int, start: int, number: int) -> NDArray[np.int64]:
    """Numbers ``start`` to ``start + number`` of a stream of random integers from 0 to ``below`` - 1, int64 ``[number]``.

    Philox counts (Salmon et al. 2011, https://doi.org/10.1145/2063384.2063405): any part of the stream is drawn without those before it.
    32 random bits are scaled to the range, which favours no value by more than below / 2^32.
    """
    before = start % 4  # a count gives four numbers
    raw = np.random.Philox(key=key, counter=start // 4).random_raw(before + number)[before:]
    scaled: NDArray[np.int64] = ((raw >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(np.int64)
    return scaled


class RandomBlocks:
    """Samples of one length, each predicting its ids shifted by one; each begins with the last target of the one before it.

    Args:
        ids: int64 ``[number]`` of a stream, by start and number.
    """

    def __init__(self, ids: Callable[[int, int], NDArray[np.int64]], number: int, length: int) -> None:
        self._ids, self._number, self._length = ids, number, length

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._number:
            raise IndexError(index)
        return _shifted(self._ids(index * self._length, self._length + 1))


class RandomDocuments:
    """Samples of the lengths given, the n-th of them the beginning of the n-th block of ``most`` ids."""

    def __init__(self, ids: Callable[[int, int], NDArray[np.int64]], lengths: NDArray[np.int64], most: int) -> None:
        self._ids, self._lengths, self._most = ids, lengths, most

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of each sample."""
        return self._lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return _shifted(self._ids(index * self._most, int(self._lengths[index]) + 1))


def _shifted(ids: NDArray[np.int64]) -> Sample:
    tensor = torch.from_numpy(ids)
    return {"input_ids": tensor[:-1], "labels": tensor[1:]}


def _text(samples: Samples, tokenizer: Tokenizer) -> Callable[[], list[str]]:
    """What the labels of each sample are in text."""
    return lambda: [tokenizer.decode(samples[index]["labels"]) for index in range(len(samples))]


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """Ids written as decimal numbers with spaces between them; the last id is for all else."""
    words = {str(number): number for number in range(vocab_size - 1)} | {_UNKNOWN: vocab_size - 1}
    backend = Backend(models.WordLevel(words, unk_token=_UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer.from_backend(backend)
