"""Every rank keeps everything and sees other data; gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import TensorWeakRef

from fw.api import REPLICATE, CausalLM, KeptTensors, ShardingPlugin, Stepper, StepSpec, UserError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

from fw_plugins.sharding import casting, offloaded
from fw_plugins.sharding.torch_stepper import TorchStepper


@dataclass
class DDPConfig:
    """How gradients travel."""

    bucket_mb: int = 25
    """MiB of gradients per all-reduce. Larger buckets overlap less and take that much more memory unless they are views."""
    gradient_as_bucket_view: bool = True
    """Let gradients live in the buckets, which saves a copy of all gradients."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order: less bookkeeping, but gradients are
    reduced after every micro-batch."""

    def __post_init__(self) -> None:
        if self.bucket_mb < 1:
            raise UserError(f"sharding.bucket_mb: {self.bucket_mb} is too small; the least is 1")


class DDP(ShardingPlugin):
    """Data parallel (torch DDP): a full copy of parameters, gradients and optimizer state on every rank."""

    api = 1
    moves_parameters = False
    Config = DDPConfig
    config: DDPConfig
    not_options: ClassVar[Mapping[str, str]] = {
        "tensor": "ddp keeps whole layers on every rank; use sharding=fsdp, with shard: 1 where only layers are to be divided",
        "context": "ddp keeps whole sequences on every rank; use sharding=fsdp, with shard: 1 where only sequences are to be divided",
    }

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """All ranks are replicas."""
        return {REPLICATE: world_size}

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """Dtypes and tiers of offload."""
        casting.check(spec)
        if spec.precision.accumulates_apart and spec.offload.gradients == "device":
            raise UserError(
                "precision.accumulate: ddp sums gradients up in the buckets it averages, as wide as parameters; use sharding=fsdp"
            )
        if spec.optimizer.in_backward:
            raise UserError("optimizer.in_backward: ddp averages gradients in buckets after they have come; use sharding=fsdp")
        offloaded.check(spec, model, parts=1, gathers=False)

    def traced(self, spec: StepSpec) -> AbstractContextManager[object]:
        """Without files."""
        return offloaded.without_files()

    def shard(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> None:
        """Nothing to divide; the wrapper comes with the step."""
        casting.widen_lookups(model, spec.precision.parameters)

    def stepper(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> Stepper:
        """The plain step over averaged gradients."""
        assert mesh is not None
        return _DDPStepper(model, mesh, spec, self.config)


class _DDPStepper(TorchStepper):
    def __init__(self, model: CausalLM, mesh: DeviceMesh, spec: StepSpec, config: DDPConfig) -> None:
        super().__init__(model, spec, replicas=mesh.size())
        policy = spec.precision
        self._static_graph = config.static_graph
        self._views: list[TensorWeakRef] = []
        """Gradients of the step before: what they lay in is there still where they were views of the reducer's buckets."""
        self._wrapped = DistributedDataParallel(
            model,
            process_group=mesh.get_group(),
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
            init_sync=False,  # weights are equal by construction
        )
        if policy.reduce != policy.parameters:
            # A lambda, since torch compares a hook's annotations with types and would find strings.
            averages = Averages(policy.reduce, spec.device_type == "cpu", config.static_graph)
            self._wrapped.register_comm_hook(averages, lambda state, bucket: state.reduce(bucket))

    @property
    def module(self) -> nn.Module:
        return self._wrapped

    def kept(self) -> KeptTensors:
        found = super().kept()
        return replace(found, gradients=[*found.gradients, *(view for ref in self._views if (view := ref()) is not None)])

    def _drop_gradients(self) -> None:
        self._views = [TensorWeakRef(p.grad) for p in self._trained if p.grad is not None]
        super()._drop_gradients()

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        # A static graph is learnt in the first backward, which torch does not allow to be without synchronisation. Gradients that leave
        # for the host must be reduced before.
        return nullcontext() if last or self._static_graph or self._gradients_on_host else self._wrapped.no_sync()


class Averages:
    """Averages buckets in another dtype.

    On the host one after another: the copy of a bucket is made when that of the one before is gone. Backward waits for that, where it
    would be ahead; else all copies would be there at once wherever ranks are not at one place.

    Args:
        on_host: as gloo does, on the host.
        one_call: whether the reducer calls for all buckets one after another, of which none says that it is the last (a static graph).
    """

    def __init__(self, dtype: torch.dtype, on_host: bool, one_call: bool = False) -> None:
        self._dtype, self._on_host, self._one_call = dtype, on_host, one_call
        self._under_way: Callable[[], None] | None = None

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket, then give it back in its own dtype."""
        buffer = bucket.buffer()
        if not self._on_host:
            _, work = self._averaged(buffer)
            return work.get_future().then(lambda future: buffer.copy_(future.value()[0]))
        self._finish()
        copy, work = self._averaged(buffer)
        done: torch.futures.Future[Tensor] = torch.futures.Future()

        def finish() -> None:
            work.wait()
            buffer.copy_(copy)
            if copy is not buffer:
                copy.untyped_storage().resize_(0)  # gloo's thread keeps the tensor for a moment
            done.set_result(buffer)

        self._under_way = finish
        if self._one_call or bucket.is_last():  # backward has nothing left to do meanwhile
            self._finish()
        return done

    def _averaged(self, buffer: Tensor) -> tuple[Tensor, dist.Work]:
        copy = buffer.to(self._dtype).div_(dist.get_world_size())
        work = dist.all_reduce(copy, async_op=True)
        assert work is not None
        return copy, work

    def _finish(self) -> None:
        finish, self._under_way = self._under_way, None
        if finish is not None:
            finish()
