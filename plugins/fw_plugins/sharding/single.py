"""One rank that keeps everything."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from fw.errors import UserError
from fw.kinds.model import CausalLM
from fw.kinds.optimizer import OptimizerSpec
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import ShardingPlugin, Stepper
from fw_plugins.sharding.torch_stepper import TorchStepper


class SingleRank(ShardingPlugin):
    """No sharding: one rank keeps parameters, gradients and optimizer state whole."""

    api = 1

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """No mesh; one rank only."""
        if world_size != 1:
            raise UserError(f"sharding 'single' runs on one rank, not {world_size}; choose sharding=ddp or sharding=fsdp")
        return {}

    def shard(self, model: CausalLM, mesh: DeviceMesh | None, policy: PrecisionPolicy) -> None:
        """Nothing to divide."""

    def stepper(self, model: CausalLM, mesh: DeviceMesh | None, policy: PrecisionPolicy, spec: OptimizerSpec, clip_norm: float) -> Stepper:
        """The plain step."""
        return TorchStepper(model, policy, spec, clip_norm)
