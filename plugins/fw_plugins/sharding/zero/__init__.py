"""DeepSpeed's ZeRO (https://arxiv.org/abs/1910.02054)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fw.api import SHARD, CausalLM, Give, ShardingPlugin, Stepper, StepSpec
from fw_plugins.sharding.torch_stepper import parameter_groups
from fw_plugins.sharding.zero import disk, ds_config, engine, ops, pieces, placing, rules, traced
from fw_plugins.sharding.zero.config import ZeroConfig
from fw_plugins.sharding.zero.stepper import ZeroStepper

FILE = "deepspeed.json"


class Zero(ShardingPlugin):
    """ZeRO by DeepSpeed: optimizer state (stage 1), gradients (2), parameters (3) divided over ranks; offload to host and disk."""

    api = 1
    Config = ZeroConfig
    config: ZeroConfig
    not_options: ClassVar[Mapping[str, str]] = {
        "tensor": "zero divides state and no layers; tensor parallelism is sharding=fsdp's",
        "context": "zero divides state and no sequences; context parallelism is sharding=fsdp's",
        "replicate": "zero divides state over all ranks; copies of a divided model are sharding=fsdp's",
    }
    packages = {"deepspeed": "deepspeed"}  # noqa: RUF012

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """All ranks divide the state and see different samples."""
        return {SHARD: world_size}

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """What DeepSpeed has no means for, and the disk's free space."""
        rules.check(self.config, spec, model, mesh_shape[SHARD])

    def prepare(self, spec: StepSpec, say: Callable[[str], None]) -> None:
        """Compile the operators of offload."""
        ops.prepare(needed(spec), say, spec.device_type)

    def share(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, rank: int) -> tuple[int, ...]:
        """Equal in stage 3, which pads each parameter's last part."""
        return () if self.config.stage == 3 else pieces.pieces(self.config, spec, model, mesh_shape[SHARD], rank)

    def traced(self, spec: StepSpec) -> AbstractContextManager[object]:
        """DeepSpeed is alone."""
        return traced.alone(spec.device_type)

    def shard(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> None:
        """DeepSpeed does so as the model leaves the meta device."""

    def stepper(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> Stepper:
        """There is none without values."""
        raise NotImplementedError("DeepSpeed's engine exists before the values do; call start")

    def start(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec, device: torch.device, give: Give) -> Stepper:
        """The engine first, then the values: master weights get theirs in full precision, and each rank only its own."""
        package = engine.deepspeed(spec.device_type)
        engine.join(package)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        sizes = [p.numel() for p in model.parameters()]
        undecayed = model.whole_undecayed()
        nvme = None
        if spec.offload.path is not None and "nvme" in (spec.offload.optimizer, spec.offload.params):
            nvme = disk.OwnDirectory(spec.offload.path)
        config = ds_config.build(self.config, spec, dist.get_world_size(), sum(sizes), max(sizes), nvme.path if nvme else None)
        text = json.dumps(config, indent=1) + "\n"
        try:
            model.to(spec.precision.compute)
            if self.config.stage == 3:
                placing.partition(model, package, config, device)
            else:
                model.materialise(device)
            groups = parameter_groups(model.named_parameters(), undecayed, spec.optimizer.weight_decay)
            with engine.silent():
                made, *_ = package.initialize(model=model, optimizer=_optimizer(spec, groups), config=config, dist_init_required=False)
            stepper = ZeroStepper(made, list(model.named_parameters()), shapes, spec, {FILE: text}, nvme)
            stepper.fill(give)
            give({name: tensor for name, tensor in model.stored().items() if name not in shapes})
        except BaseException:
            if nvme is not None:
                nvme.remove()
            raise
        return stepper


def needed(spec: StepSpec) -> list[str]:
    """Which of DeepSpeed's operators the step uses."""
    offload = spec.offload
    adam = offload.optimizer != "device" and _is_adamw(spec)
    files = "nvme" in (offload.optimizer, offload.params)
    return [*(["cpu_adam"] if adam else []), *(["pin_memory", "async_io"] if files else [])]


def _optimizer(spec: StepSpec, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The specification's, or DeepSpeed's own AdamW where it is stepped on the host."""
    wanted = spec.optimizer
    if spec.offload.optimizer == "device" or not _is_adamw(spec):
        return wanted.cls(groups, lr=wanted.lr, **wanted.arguments)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    arguments = {key: wanted.arguments[key] for key in ("betas", "eps") if key in wanted.arguments}
    made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, lr=wanted.lr, adamw_mode=True, fp32_optimizer_states=True, **arguments)
    return made


def _is_adamw(spec: StepSpec) -> bool:
    """Whether DeepSpeed's AdamW computes the same."""
    arguments = spec.optimizer.arguments
    cls = spec.optimizer.cls
    return isinstance(cls, type) and issubclass(cls, torch.optim.AdamW) and not arguments.get("amsgrad") and not arguments.get("maximize")
