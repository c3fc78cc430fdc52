"""The contract of ``offload``: what lives on the host or on disk. Parameters, gradients and optimizer state are sharding's, which moves
them as the policy says; activations the plugin moves itself."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from fw.kinds.model import CausalLM
from fw.registry import Plugin

Tier = Literal["device", "cpu", "nvme"]
"""``device``: where the model computes. ``cpu``: host memory, page-locked where there is a GPU. ``nvme``: files on a disk."""


@dataclass(frozen=True)
class OffloadPolicy:
    """Where each part of training state lives between its uses.

    Attributes:
        path: directory for what lives on ``nvme``; None where nothing does, or in files that are there.
        budget: bytes of parameters that are in memory although ``params`` leaves them in files; None for what cannot stay there.
        modules: patterns of names, of the parameters that may stay there; none for all.
        host_budget: bytes of host memory for parameters that a GPU has no room for, before they stay in files.
        automatic: parameters are where there is room, the device first; budgets that are None are to be found out.
    """

    optimizer: Tier = "device"
    params: Tier = "device"
    gradients: Tier = "device"
    activations: Tier = "device"
    path: Path | None = None
    budget: int | None = None
    modules: tuple[str, ...] = ()
    host_budget: float | None = None
    automatic: bool = False

    @property
    def params_in_files(self) -> bool:
        """Whether parameters stay in the files of the model's own directory."""
        return self.params == "nvme" and self.path is None

    def on_cpu(self) -> OffloadPolicy:
        """Where the host's memory is the device's: of two budgets the lower."""
        bounds = [bound for bound in (self.budget, self.host_budget) if bound is not None]
        return replace(self, budget=int(min(bounds)) if bounds else None, host_budget=None)

    @property
    def nothing(self) -> bool:
        """Whether all of it stays on the device."""
        return {self.optimizer, self.params, self.gradients, self.activations} == {"device"}


class OffloadPlugin(Plugin):
    """Decides the tiers."""

    kind: ClassVar[str] = "offload"

    @abstractmethod
    def policy(self) -> OffloadPolicy:
        """The tiers; the same on every rank."""

    @abstractmethod
    def attach(self, model: CausalLM) -> None:
        """Arrange that what the blocks keep for backward lives on its tier. Called on every rank, once the model is divided."""
