"""The contract of ``data``: a tokenizer and two indexed sets of samples. Order, sharing among ranks and resuming are the core's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fw.registry import Plugin

Sample = dict[str, Tensor]
"""``input_ids`` and ``labels``, int64 ``[L]``; ``labels[i]`` is the token to predict from ``input_ids[: i + 1]``, -100 for none.

Optional: ``segments``, int64 ``[L]``, the number of the document each token belongs to, counted from 1 in the sample, 0 for padding;
attention stays inside a segment.
"""

IGNORED = -100
"""The label of a position that nothing is predicted at."""

Say = Callable[[str], None]


class Tokenizer(Protocol):
    """Text to ids and back; :class:`fw.tokenizer.Tokenizer` is one."""

    @property
    def vocab_size(self) -> int:
        """The highest id and one: all ids are below it."""

    @property
    def bos_id(self) -> int | None:
        """The id that begins a text, None where there is none."""

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, None where there is none."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, with what the tokenizer puts around one unless ``add_special_tokens`` is off."""

    def decode(self, ids: Sequence[int] | Tensor, *, skip_special_tokens: bool = False) -> str:
        """Text of ids, a list or a tensor of one dimension."""

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json`` and what belongs to it, as transformers reads them."""


class Samples(Protocol):
    """A set of samples that can be read in any order, from any rank; all of one length unless they are :class:`VaryingSamples`."""

    def __len__(self) -> int:
        """How many."""

    def __getitem__(self, index: int) -> Sample:
        """The sample; equal on every rank and in every run. Of ``sequence_length`` positions, but for :class:`VaryingSamples`."""


@runtime_checkable
class VaryingSamples(Samples, Protocol):
    """Samples of different length. The core pads them, packs several into a row, and finds those that fit together."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Positions of each sample ``[len(self)]``, 1 to the ``sequence_length`` of :meth:`DataPlugin.open`; no sample is read for it."""


@dataclass(frozen=True)
class Rows:
    """What the rows of micro-batches are like, as data and packing make them.

    Attributes:
        vary: micro-batches have rows of different length.
        segments: batches have ``segments``: rows hold several documents that do not see each other, or padding.
    """

    vary: bool = False
    segments: bool = False


CUT_OFF = "nothing to learn left"
"""Among :attr:`Corpus.facts`."""


@dataclass(frozen=True)
class Corpus:
    """What :meth:`DataPlugin.open` gives.

    Attributes:
        train, val: both :class:`VaryingSamples`, or neither.
        fingerprint: changes when samples or tokenizer do; a run resumes only on the data it began with.
        val_bytes: bytes of text the validation labels stand for, so that a loss becomes bits per byte.
        train_text, val_text: documents for baselines and prompts, read lazily.
        lengths: gives the tokens of each training document; None where samples are all there is to know.
        facts: what was found while it was made: ``documents``, exact ``duplicates`` among what was read, ``bad`` records that were
            left out, and how many of which all that is learnt is behind the cut at ``sequence_length`` (:data:`CUT_OFF`).
    """

    train: Samples
    val: Samples
    tokenizer: Tokenizer
    fingerprint: str
    train_tokens: int
    val_tokens: int
    val_bytes: int
    train_text: Callable[[], list[str]]
    val_text: Callable[[], list[str]]
    lengths: Callable[[], NDArray[np.int64]] | None = None
    facts: Mapping[str, int] = field(default_factory=dict)


class DataPlugin(Plugin):
    """Finds, tokenizes and caches text."""

    kind: ClassVar[str] = "data"

    @abstractmethod
    def prepare(self, say: Say) -> None:
        """Do the slow work once and keep its result on disk. Called in one process of a host at a time, before training.

        Raises:
            UserError: the source is missing, empty or unreadable.
        """

    @abstractmethod
    def open(self, sequence_length: int) -> Corpus:
        """The samples, of ``sequence_length`` positions or at most so many, after :meth:`prepare`.

        Called on every rank; must be quick and must not hold the data in memory.
        """
