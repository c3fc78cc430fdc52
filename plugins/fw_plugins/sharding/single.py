"""One rank that keeps everything."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from torch.distributed.device_mesh import DeviceMesh

from fw.api import CausalLM, ShardingPlugin, Stepper, StepSpec, UserError
from fw_plugins.sharding import casting, narrow, offloaded


class SingleRank(ShardingPlugin):
    """No sharding: one rank keeps parameters, gradients and optimizer state whole."""

    api = 1
    moves_parameters = False

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """No mesh; one rank only."""
        if world_size != 1:
            raise UserError(f"sharding 'single' runs on one rank, not {world_size}; choose sharding=ddp or sharding=fsdp")
        return {}

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """Dtypes and tiers of offload."""
        casting.check(spec)
        offloaded.check(spec, model, parts=1, gathers=False)

    def traced(self, spec: StepSpec) -> AbstractContextManager[object]:
        """Without files."""
        return offloaded.without_files()

    def shard(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> None:
        """Nothing to divide; gradients stay as narrow as they come, where that changes nothing."""
        casting.widen_lookups(model, spec.precision.parameters)
        if narrow.fits(spec):
            narrow.narrow(model)

    def stepper(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> Stepper:
        """The plain step."""
        return narrow.NarrowStepper(model, spec)
