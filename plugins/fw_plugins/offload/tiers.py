"""A tier of memory for each part of training state."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fw.api import CausalLM, OffloadPlugin, OffloadPolicy, UserError, parse_size


@dataclass
class TiersConfig:
    """Where each part of training state lives between its uses: `device`, `cpu` (host memory) or `nvme` (files under `path`)."""

    optimizer: Literal["device", "cpu", "nvme"] = "device"
    """Optimizer state; the step is computed on the host. Frees all of it on the device (8 bytes per parameter for AdamW in fp32)."""
    params: Literal["device", "cpu", "nvme", "auto"] = "device"
    """This rank's share of the parameters, copied to the device block by block; needs sharding that gathers them so. On a CPU
    with `nvme` and no `path`, weights are used where they lie in the model's files, and take none of the process's memory: all while
    generating, frozen ones while adapters train. A GPU that generates is brought them from there, or from host memory (`cpu`), while the
    block before computes. `auto`: where there is room, on the device first, then in host memory, then in the files; see `max_memory`."""
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
    """Memory of the device for weights where others stay in the model's files or in host memory, like 4GiB: on a CPU the embedding leaves
    first, then the last blocks; of a GPU, blocks spread evenly. Empty: all leave that can."""
    max_memory: dict[str, str] = field(default_factory=dict)
    """For `params: auto`, what weights may take of `device` and of `cpu`, like `{device: 20GiB, cpu: 60GiB}`. What is not said is what a
    plan finds left beside all else, and of the host 80 % of what is free."""
    modules: list[str] = field(default_factory=list)
    """Patterns of the weights that may leave the device, like `layers.1?`; empty for all."""
    path: str = ""
    """Directory on the disk for `nvme`; before the run starts it is tried, and its free space compared with what the state will take."""

    def __post_init__(self) -> None:
        parse_size(self.activations_above)
        if self.activations_prefetch < 0:
            raise UserError(f"offload.activations_prefetch: {self.activations_prefetch} is below 0")
        if self.activations_prefetch != TiersConfig.activations_prefetch and self.activations == "device":
            raise UserError("offload.activations_prefetch: activations stay on the device; leave it out, or set activations to cpu or nvme")
        if self.activations_above != TiersConfig.activations_above and self.activations == "device":
            raise UserError("offload.activations_above: activations stay on the device; leave it out, or set activations to cpu or nvme")
        for name in ("budget", "modules"):
            if getattr(self, name) and self.params == "device":
                raise UserError(f"offload.{name}: parameters stay on the device; leave it out, or set offload.params")
        if self.budget:
            parse_size(self.budget)
        self._check_max_memory()
        on_disk = [name for name in ("optimizer", "params", "activations") if getattr(self, name) == "nvme"]
        if not self.path and on_disk and on_disk != ["params"]:  # parameters may be in files already
            raise UserError(
                f"offload.{next(name for name in on_disk if name != 'params')}: nvme needs offload.path, a directory on the disk"
            )
        if self.path and not on_disk:
            raise UserError("offload.path: nothing is offloaded to nvme; leave it out, or set optimizer, params or activations to nvme")

    def _check_max_memory(self) -> None:
        automatic = self.params == "auto"
        if self.max_memory and not automatic:
            raise UserError(f"offload.max_memory: is for params: auto, which is {self.params}; leave it out, or use budget")
        if automatic and (self.budget or self.path):
            name, instead = ("budget", "max_memory: {device: …}") if self.budget else ("path", "nothing: files are the model's own")
            raise UserError(f"offload.{name}: params: auto takes {instead}; leave it out")
        for name, size in self.max_memory.items():
            if name not in ("device", "cpu"):
                raise UserError(f"offload.max_memory: '{name}' is none of device and cpu; ranks of several GPUs are inference.tensor")
            parse_size(size)


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
        if c.params != "auto":
            return OffloadPolicy(c.optimizer, c.params, c.gradients, c.activations, path, budget, tuple(c.modules))
        most = {name: parse_size(size) for name, size in c.max_memory.items()}
        policy = OffloadPolicy(c.optimizer, "nvme", c.gradients, c.activations, path, most.get("device"), tuple(c.modules))
        return replace(policy, host_budget=most.get("cpu"), automatic=True)

    def attach(self, model: CausalLM) -> None:
        """Hooks on what autograd saves inside the blocks."""
        if self.config.activations != "device":
            from fw_plugins.offload import activations  # DTensor takes half a second to import, which inference has better uses for

            activations.attach(model, self.policy(), parse_size(self.config.activations_above), self.config.activations_prefetch)
