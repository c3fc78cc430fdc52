"""A tier of memory for each part of training state."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fw.api import CausalLM, OffloadPlugin, OffloadPolicy, UserError, parse_size
from fw_plugins.offload import activations


@dataclass
class TiersConfig:
    """Where each part of training state lives between its uses: `device`, `cpu` (host memory) or `nvme` (files under `path`)."""

    optimizer: Literal["device", "cpu", "nvme"] = "device"
    """Optimizer state; the step is computed on the host. Frees all of it on the device (8 bytes per parameter for AdamW in fp32)."""
    params: Literal["device", "cpu", "nvme"] = "device"
    """This rank's share of the parameters, copied to the device block by block; needs sharding that gathers them so. On a CPU
    with `nvme` and no `path`, weights are used where they lie in the model's files, and take none of the process's memory: all while
    generating, frozen ones while adapters train."""
    gradients: Literal["device", "cpu"] = "device"
    """Gradients, once they are reduced over ranks."""
    activations: Literal["device", "cpu", "nvme"] = "device"
    """What forward keeps for backward: copied away in forward, back in backward. Frees it on the device at the price of two copies."""
    activations_above: str = "64KiB"
    """Activations below this stay on the device: too many copies for too few bytes."""
    activations_prefetch: int = 1
    """Blocks whose activations are brought back in backward while a later one is computed. Each of them, and that one, takes the bytes
    that a block keeps: on the device (`cpu`) or in host memory (`nvme`). 0 brings each tensor when it is asked for: least memory, and
    backward waits for every copy."""
    budget: str = ""
    """Memory for weights where they stay in the model's files, like 4GiB: the rest stays there, the embedding first, then the last blocks.
    Empty: all stay there that can."""
    modules: list[str] = field(default_factory=list)
    """Patterns of the weights that may stay in the model's files, like `layers.1?`; empty for all."""
    path: str = ""
    """Directory on the disk for `nvme`; before the run starts it is tried, and its free space compared with what the state will take."""

    def __post_init__(self) -> None:
        parse_size(self.activations_above)
        if self.activations_prefetch < 0:
            raise UserError(f"offload.activations_prefetch: {self.activations_prefetch} is below 0")
        if self.activations_prefetch != TiersConfig.activations_prefetch and self.activations == "device":
            raise UserError("offload.activations_prefetch: activations stay on the device; leave it out, or set activations to cpu or nvme")
        for name in ("budget", "modules"):
            if getattr(self, name) and self.params == "device":
                raise UserError(f"offload.{name}: parameters stay on the device; leave it out, or set offload.params")
        if self.budget:
            parse_size(self.budget)
        on_disk = [name for name in ("optimizer", "params", "activations") if getattr(self, name) == "nvme"]
        if not self.path and on_disk and on_disk != ["params"]:  # parameters may be in files already
            raise UserError(
                f"offload.{next(name for name in on_disk if name != 'params')}: nvme needs offload.path, a directory on the disk"
            )
        if self.path and not on_disk:
            raise UserError("offload.path: nothing is offloaded to nvme; leave it out, or set optimizer, params or activations to nvme")


class Tiers(OffloadPlugin):
    """Training state on the device, in host memory or on disk, part by part."""

    api = 1
    Config = TiersConfig
    config: TiersConfig

    def policy(self) -> OffloadPolicy:
        """As configured."""
        c = self.config
        path = Path(c.path) if c.path else None
        budget = parse_size(c.budget) if c.budget else None
        return OffloadPolicy(c.optimizer, c.params, c.gradients, c.activations, path, budget, tuple(c.modules))

    def attach(self, model: CausalLM) -> None:
        """Hooks on what autograd saves inside the blocks."""
        if self.config.activations != "device":
            activations.attach(model, self.policy(), parse_size(self.config.activations_above), self.config.activations_prefetch)
