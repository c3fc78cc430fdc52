"""The contract of ``checkpoint``: how state reaches disk and comes back."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fw.errors import UserError
from fw.kinds.model import Adapters, CausalLM, Give, HFTensor
from fw.place import Place
from fw.registry import Plugin

T = TypeVar("T")
_ALL = HFTensor("")


Region = tuple[slice, ...] | slice
"""Part of a tensor: a slice per dimension, or one slice of the flattened tensor."""


@dataclass(frozen=True)
class Piece:
    """What a rank keeps of a tensor.

    Attributes:
        where: it stands in the whole.
        read: gives the values, shaped like ``where``, on any device; not collective. They are valid until training goes on.
    """

    where: Region
    read: Callable[[], Tensor]


class Kept(ABC):
    """A tensor whose pieces lie on several ranks, where only their engine knows."""

    shape: torch.Size
    """Of the whole."""
    dtype: torch.dtype

    @abstractmethod
    def piece(self) -> Piece | None:
        """This rank's; None where it has none. Pieces of two ranks are the same or do not overlap."""


@dataclass(frozen=True)
class Part:
    """A tensor of a file, where it is kept: ``tensor`` is a parameter, a DTensor where it is sharded, of which it is the part ``of``."""

    tensor: Tensor | Kept
    of: HFTensor = _ALL

    @property
    def region(self) -> tuple[slice, ...]:
        """What it is of the parameter; as many slices as that has dimensions."""
        region = [slice(0, size) for size in self.tensor.shape]
        if self.of.index is not None:
            region[0] = slice(self.of.index, self.of.index + 1)
        if self.of.rows is not None:
            region[self.of.index is not None] = slice(*self.of.rows)
        return tuple(region)

    def as_in_file(self, region: Tensor) -> Tensor:
        """What is there of :attr:`region`, or of a part of it, laid out as in the file; a view."""
        region = region if self.of.index is None else region.squeeze(0)
        return region.t() if self.of.transposed else region

    @property
    def shape(self) -> tuple[int, ...]:
        """In the file."""
        sizes = [s.stop - s.start for s in self.region][self.of.index is not None :]
        return tuple(sizes[::-1] if self.of.transposed else sizes)

    @property
    def dtype(self) -> torch.dtype:
        """In the file."""
        return self.tensor.dtype

    def whole(self, parameter: Tensor) -> Tensor:
        """All of it, from all of the parameter; a view."""
        return self.as_in_file(parameter[self.region])


def parts(model: CausalLM, tensors: Mapping[str, Tensor] | Mapping[str, Tensor | Kept]) -> dict[str, Part]:
    """Tensors by the model's names, as a Hugging Face file names and holds them."""
    return {stored.name: Part(tensor, stored) for name, tensor in tensors.items() for stored in model.hf_tensors(name)}


def adapter_parts(adapters: Adapters, tensors: Mapping[str, Tensor] | Mapping[str, Tensor | Kept]) -> dict[str, Part]:
    """Those of the tensors that an adapter's file holds, as it names them."""
    found = {of.name: Part(tensors[name], of) for name, of in adapters.tensors.items() if name in tensors}
    again = {name: found[of] for name, of in adapters.repeated.items() if of in found}
    return {**found, **{name: Part(part.tensor, replace(part.of, name=name)) for name, part in again.items()}}


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        mesh: sizes of the device mesh by dimension; empty for one rank without one.
        metrics: of this step, by which checkpoints can be compared.
        parent: name of the checkpoint its run went on from or has written before; None for the first.
        tensors: groups of tensors by the stem of their files: ``model`` by Hugging Face name, or ``adapter_model`` by peft's where only
            adapters train; ``optimizer`` by ``<parameter>/<key>``.
            Names and order are the same on every rank.
        rng: states of this rank's random generators, as JSON.
        state: everything else a resume needs, as JSON; equal on every rank.
        write_files: writes config.json, tokenizer and the run's configuration into a directory; called on the first rank only.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Part]]
    rng: Mapping[str, Any]
    state: Mapping[str, Any]
    write_files: Callable[[Path], None]
    mesh: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    parent: str | None = None


class Writes(NamedTuple):
    """What a rank has to do with a save.

    Attributes:
        disk: bytes of tensors that it writes.
        host: of host memory that it takes meanwhile, at most, for tensors that it puts together.
    """

    disk: int
    host: int


class NewerFormatError(UserError):
    """A checkpoint was written by a newer fw."""


class Beat(Protocol):
    """How a rank at work tells its peers that it comes on."""

    def __call__(self, doing: str = "", size: int = 0) -> None:
        """Something was done, ``size`` bytes written; ``doing`` says what comes next."""

    @property
    def failed(self) -> bool:
        """Whether a rank has failed: what is done now is for nothing, but peers may still wait for what they were promised."""


class Ranks(ABC):
    """The ranks that save together, on the host and apart from training: all of them may be used from a thread."""

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """What every rank has, on every rank."""

    @abstractmethod
    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Give a contiguous tensor on the host to one rank; returns when it has it."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int, tag: int) -> None:
        """Fill a contiguous tensor on the host with what that rank sends."""

    @abstractmethod
    def together(self, what: str, work: Callable[[Beat], T]) -> list[T]:
        """Do the work on every rank, and end when all have done it.

        Args:
            what: a few words for the error.

        Returns:
            what ``work`` returned, by rank.

        Raises:
            RunError: it failed on a rank, or a rank was lost or made no progress within the time-out; the same sentence on all ranks.
        """


@dataclass
class CheckpointOptions:
    """What every format is asked for. ``train.save_every`` says how often."""

    to: str = ""
    """Directory or URL (``s3://bucket/run``, ``gs://…``, whatever fsspec knows) for the checkpoints; ``checkpoints`` in the run directory
    where empty."""
    asynchronous: bool = False
    """Copy the state to host memory and write it while training goes on. A rank then keeps a second copy of its part of weights and
    optimizer state in host memory."""
    when_busy: Literal["wait", "skip"] = "wait"
    """What to do where a save is due and the one before is still being written: wait for it, or leave this one out."""
    keep_last: int = 0
    """Newest checkpoints to keep; older ones are removed once a new one is durable. 0: all of them."""
    keep_every: int = 0
    """Besides, keep those whose step is a multiple of this, for ever. 0: none. Needs ``keep_last``."""
    keep_best: int = 0
    """Besides, keep as many with the best ``metric``. Needs ``keep_last``."""
    metric: str = "val_loss"
    """By which checkpoints are compared: ``val_loss`` (then ``train.save_every`` is a multiple of ``train.val_every``) or ``loss``."""
    mode: Literal["min", "max"] = "min"
    """Whether a small or a large ``metric`` is good."""
    grace: int = 0
    """Seconds that a run has, once it is asked to end (SIGTERM, SIGUSR1), to finish its step and save. It ends when they are over, saved or
    not. 0: as long as it takes."""

    timeout: int = 0
    """Seconds without progress on a rank after which a save is given up on all ranks; longer than the disk takes to make a file of
    ``max_shard_size`` durable. 0: as `launch.timeout`."""

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best", "grace", "timeout"):
            if getattr(self, name) < 0:
                raise UserError(f"checkpoint.{name}: {getattr(self, name)} is negative")
        for name in ("keep_every", "keep_best"):
            if getattr(self, name) and not self.keep_last:
                raise UserError(
                    f"checkpoint.{name}: {getattr(self, name)} keeps nothing that checkpoint.keep_last=0 would not; set keep_last too"
                )
        if self.metric not in ("val_loss", "loss"):
            raise UserError(f"checkpoint.metric: '{self.metric}' is not among val_loss, loss")


class Reader(ABC):
    """An opened checkpoint. Tensors are read by the slice, never whole where a rank keeps a part."""

    place: Place
    identity: str
    """Tells it from every other checkpoint, also from one of the same name."""

    @abstractmethod
    def damages(self, share: tuple[int, int] = (0, 1), progress: Callable[[int], object] = lambda count: None) -> list[str]:
        """What is missing or is not as it was written, a sentence each. All of it is read.

        Args:
            share: ``(rank, ranks)``: ranks that ask at the same time read a part each.
            progress: hears of bytes read.
        """

    @abstractmethod
    def weights(self, model: CausalLM) -> Give:
        """What fills tensors that the model stores, of one with adapters those that they hold; ``model`` may be on the meta device.

        Raises:
            UserError: names missing or unexpected, shapes that differ; all are listed.
        """

    def average(self, model: CausalLM) -> Give | None:
        """As :meth:`weights`, of the average that the run kept besides, in the snapshot's group ``average``; None where there is none."""
        return None

    @abstractmethod
    def optimizer(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Optimizer tensors by ``<parameter>/<key>``, those shaped like a parameter placed like it. Each is read when it is looked up.

        Raises:
            RunError: state of a parameter that is not among ``parameters``.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """:attr:`Snapshot.state`."""

    @abstractmethod
    def rng(self, rank: int) -> dict[str, Any]:
        """:attr:`Snapshot.rng` of a rank; empty where the checkpoint has no such rank."""


class CheckpointPlugin(Plugin):
    """Decides the format. Its options are :class:`CheckpointOptions` and what the format has besides."""

    kind: ClassVar[str] = "checkpoint"
    config: CheckpointOptions

    @abstractmethod
    def save(self, directory: Place, snapshot: Snapshot, ranks: Ranks) -> Place:
        """Write ``directory/step-…`` and move ``latest`` to it. Collective; returns when the checkpoint is durable.

        Raises:
            RunError: it could not be written, the same on all ranks; what was there before is untouched.
        """

    def writes(self, tensors: Mapping[str, Mapping[str, Part]], ranks: int) -> Sequence[Writes]:
        """What each rank would have to do with a save, to plan it. Here: each writes as much as the others.

        Args:
            tensors: as in a :class:`Snapshot`; they have no bytes.
        """
        total = sum(math.prod(part.shape) * part.dtype.itemsize for group in tensors.values() for part in group.values())
        return [Writes(total // ranks + (rank < total % ranks), 0) for rank in range(ranks)]

    @abstractmethod
    def found(self, directory: Place) -> list[str]:
        """Names of the checkpoints in ``directory`` in the order in which a run should go on from them; they may be damaged."""

    @abstractmethod
    def open(self, step: Place) -> Reader:
        """Open a checkpoint: a step directory.

        Raises:
            UserError: there is no checkpoint of this format, or it is damaged at first sight.
            NewerFormatError: a newer fw wrote it.
        """

    @abstractmethod
    def clean(self, directory: Place) -> None:
        """Remove what interrupted saves left. Called once, before a run writes."""

    @abstractmethod
    def prune(self, directory: Place, keep: CheckpointOptions) -> list[str]:
        """Remove what the ``keep_…`` options do not ask to keep; returns the names. What ``latest`` means always stays."""
