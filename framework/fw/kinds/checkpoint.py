"""The contract of ``checkpoint``: how state reaches disk and comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fw.kinds.model import CausalLM, Give, HFTensor
from fw.registry import Plugin

_ALL = HFTensor("")


class Gathered(ABC):
    """A tensor whose parts lie where only their engine knows; it is put together when its turn to be written comes."""

    shape: torch.Size
    """Of the whole."""
    dtype: torch.dtype

    @abstractmethod
    def full_tensor(self) -> Tensor:
        """The whole, on every rank. Collective."""


@dataclass(frozen=True)
class Part:
    """A tensor of a file, where it is kept: ``tensor`` is a parameter, a DTensor where it is sharded, of which it is the part ``of``."""

    tensor: Tensor | Gathered
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


def parts(model: CausalLM, tensors: Mapping[str, Tensor] | Mapping[str, Tensor | Gathered]) -> dict[str, Part]:
    """Tensors by the model's names, as a Hugging Face file names and holds them."""
    return {stored.name: Part(tensor, stored) for name, tensor in tensors.items() for stored in model.hf_tensors(name)}


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint holds.

    Attributes:
        step: optimizer steps done.
        weights: by Hugging Face name.
        optimizer: by ``<parameter>/<key>``.
        rng: generator states of this rank, uint8, by name.
        state: everything else a resume needs, as JSON; equal on every rank.
        write_files: writes config.json, tokenizer and the run's configuration into a directory; called on the first rank only.
    """

    step: int
    weights: Mapping[str, Part]
    optimizer: Mapping[str, Tensor | Gathered]
    rng: Mapping[str, Tensor]
    state: Mapping[str, Any]
    write_files: Callable[[Path], None]


class Reader(ABC):
    """An opened checkpoint. Tensors are read by the slice, never whole where a rank keeps a part."""

    path: Path

    @abstractmethod
    def verify(self) -> None:
        """Read everything and compare it with what was written; called on the first rank.

        Raises:
            RunError: what is missing or damaged, by name.
        """

    @abstractmethod
    def weights(self, model: CausalLM) -> Give:
        """What fills tensors that the model stores; ``model`` may be on the meta device.

        Raises:
            UserError: names missing or unexpected, shapes that differ; all are listed.
        """

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
    def rng(self, rank: int) -> dict[str, Tensor]:
        """:attr:`Snapshot.rng` of a rank; empty where the checkpoint has no such rank."""


class CheckpointPlugin(Plugin):
    """Decides the format."""

    kind: ClassVar[str] = "checkpoint"

    @abstractmethod
    def save(self, directory: Path, snapshot: Snapshot) -> Path:
        """Write ``directory/step-…`` and move ``directory/latest`` to it. Collective; returns when the checkpoint is durable.

        Raises:
            RunError: it could not be written; what was there before is untouched.
        """

    @abstractmethod
    def latest(self, directory: Path) -> Path | None:
        """The newest whole checkpoint in ``directory``, or None where there is none."""

    @abstractmethod
    def open(self, path: Path) -> Reader:
        """Open a checkpoint: a step directory, or ``latest``.

        Raises:
            UserError: the path is no checkpoint of this format, or not whole.
        """
