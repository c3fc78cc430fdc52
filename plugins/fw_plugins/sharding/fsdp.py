"""Every rank keeps a slice of everything; blocks are gathered as they are needed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fw.kinds.model import CausalLM
from fw.kinds.sharding import SHARD, ShardingPlugin, Stepper, StepSpec
from fw_plugins.sharding.torch_stepper import TorchStepper


@dataclass
class FSDPConfig:
    """When gathered parameters are given back."""

    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward and gather them again for backward. Off: one gather less per block, and
    every rank holds all parameters in the compute dtype between forward and backward."""


class FSDP(ShardingPlugin):
    """Fully sharded data parallel (torch FSDP2): each rank keeps 1/N of parameters, gradients and optimizer state."""

    api = 1
    Config = FSDPConfig
    config: FSDPConfig

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """All ranks share one copy."""
        return {SHARD: world_size}

    def shard(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> None:
        """Each block is a unit; embedding, final norm and head form the last one."""
        assert mesh is not None
        policy = spec.precision
        dtypes = MixedPrecisionPolicy()
        if policy.compute != policy.parameters or policy.reduce != policy.parameters:
            dtypes = MixedPrecisionPolicy(param_dtype=policy.compute, reduce_dtype=policy.reduce)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=dtypes, reshard_after_forward=self.config.reshard_after_forward)
        fully_shard(model, mesh=mesh, mp_policy=dtypes, reshard_after_forward=self.config.reshard_after_forward)

    def stepper(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> Stepper:
        """The plain step over sharded gradients."""
        assert mesh is not None
        return _FSDPStepper(model, spec, replicas=mesh.size())


class _FSDPStepper(TorchStepper):
    def forward_context(self) -> AbstractContextManager[object]:
        # The mixed-precision policy casts each block's parameters as it gathers them.
        return nullcontext()
