"""The contract of ``offload``: what lives on the host or on disk, as data. Sharding owns the mechanism that moves it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from fw.registry import Plugin

Tier = Literal["device", "cpu", "nvme"]
"""``device``: where the model computes. ``cpu``: host memory, page-locked where there is a GPU. ``nvme``: files on a disk."""


@dataclass(frozen=True)
class OffloadPolicy:
    """Where each part of training state lives between its uses.

    Attributes:
        path: directory for what lives on ``nvme``; None where nothing does.
    """

    optimizer: Tier = "device"
    params: Tier = "device"
    gradients: Tier = "device"
    activations: Tier = "device"
    path: Path | None = None

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
