"""Every rank keeps a slice of everything; blocks are gathered as they are needed. Layers and sequences may be divided besides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from fw.api import (
    CONTEXT,
    REPLICATE,
    SHARD,
    TENSOR,
    AttentionPlugin,
    CausalLM,
    Give,
    PrecisionPolicy,
    ShardingPlugin,
    Stepper,
    StepSpec,
    UserError,
    plan_for,
)
from fw_plugins.sharding import context_parallel, fsdp_dtypes, offloaded, tensor_parallel
from fw_plugins.sharding.torch_stepper import TorchStepper


@dataclass
class FSDPConfig:
    """The device mesh, and when gathered parameters are given back. replicate × shard × context × tensor is the number of ranks."""

    replicate: int = 1
    """Copies of the model, each divided over its own ranks (HSDP): gathers stay inside a copy, gradients are averaged over copies."""
    shard: int | None = None
    """Ranks that divide parameters, gradients and optimizer state, and see different samples: each keeps 1/(shard · context · tensor)
    of the parameters. Empty for what the others leave of the world."""
    context: int = 1
    """Ranks that divide each sequence, and the parameters too: activations per rank shrink in proportion."""
    context_method: Literal["heads", "ring"] = "heads"
    """How attention then sees all of a sequence. `heads`: ranks exchange heads for positions; any attention plugin, windows and documents;
    `context` must divide the heads of a rank. `ring`: keys and values pass round; causal attention only, any number of ranks."""
    tensor: int = 1
    """Ranks that divide each layer, by heads and features, and what is between layers by the sequence: activations, logits and gathered
    parameters shrink in proportion. Communicates in every layer: for ranks of one host."""
    reshard_after_forward: bool | int = True
    """Free a block's gathered parameters after its forward and gather them again for backward. Off: one gather less per block, and
    every rank holds all parameters in the compute dtype between forward and backward. A number n: keep them divided over n ranks only,
    a divisor of `shard` · `context`, so that backward gathers among n."""
    forward_prefetch: int = 0
    """Blocks gathered ahead of the one that computes, where the host does not run far enough ahead by itself; each takes a gathered
    block."""
    backward_prefetch: int = 1
    """Blocks gathered ahead in backward; each takes a gathered block."""

    def __post_init__(self) -> None:
        for name in ("replicate", "shard", "context", "tensor", "backward_prefetch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"sharding.{name}: {value} is too small; the least is 1")
        if self.forward_prefetch < 0:
            raise UserError(f"sharding.forward_prefetch: {self.forward_prefetch} is below 0")


class FSDP(ShardingPlugin):
    """Fully sharded data parallel (torch FSDP2): each rank keeps 1/N of parameters, gradients and optimizer state.

    Copies of that (HSDP), tensor and context parallelism compose with it on one device mesh.
    """

    api = 1
    Config = FSDPConfig
    config: FSDPConfig
    _attention: context_parallel.DividedSequences | None = None
    _parameter_mesh: DeviceMesh | None = None

    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """By the options; what they leave open goes to `shard`."""
        c = self.config
        others = c.replicate * c.context * c.tensor
        shard = c.shard or max(1, world_size // others)
        if shard * others != world_size:
            asked = " × ".join(
                f"{k} {v}" for k, v in (("replicate", c.replicate), ("shard", c.shard), ("context", c.context)) if v not in (1, None)
            )
            asked = " × ".join(filter(None, (asked, f"tensor {c.tensor}" if c.tensor > 1 else "")))
            raise UserError(f"fsdp: {asked} does not fit {world_size} ranks; what does: {'; '.join(self._fitting(world_size))}")
        rest = {REPLICATE: c.replicate, CONTEXT: c.context, TENSOR: c.tensor}
        whole = {REPLICATE: c.replicate, SHARD: shard, CONTEXT: c.context, TENSOR: c.tensor}
        inner = shard * c.context
        reshard = c.reshard_after_forward
        if not isinstance(reshard, bool) and (reshard < 1 or inner % reshard):
            fitting = ", ".join(str(d) for d in range(1, inner + 1) if inner % d == 0)
            raise UserError(f"fsdp: reshard_after_forward {reshard} does not divide shard × context = {inner}; what does: {fitting}")
        if not isinstance(reshard, bool) and 1 < reshard < inner and c.tensor > 1:
            raise UserError(
                f"fsdp: reshard_after_forward {reshard} keeps parts of what tensor divides, which torch's FSDP2 does not; use true or false"
            )
        if c.context_method == "ring" and c.context == 1:
            raise UserError("sharding.context_method: ring passes keys between ranks of context, which is 1; leave it out, or set context")
        return {name: size for name, size in whole.items() if size > 1 or name not in rest}

    def _fitting(self, world_size: int) -> list[str]:
        """Meshes of the dimensions that were asked for, those nearest to what was asked first."""
        c = self.config
        asked = {REPLICATE: c.replicate, SHARD: c.shard or 1, CONTEXT: c.context, TENSOR: c.tensor}
        divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
        choices = [divisors if size > 1 or name == SHARD else [1] for name, size in asked.items()]
        meshes = [m for m in itertools.product(*choices) if math.prod(m) == world_size]
        meshes.sort(key=lambda m: sum(abs(math.log(a / b)) for a, b in zip(m, asked.values(), strict=True)))
        return [", ".join(f"{k}: {v}" for k, v in zip(asked, mesh, strict=True) if v > 1) or "shard: 1" for mesh in meshes[:4]]

    def length_multiple(self, mesh_shape: Mapping[str, int]) -> int:
        """Chunks of context parallelism, each of which tensor parallelism divides again."""
        tensor, context = mesh_shape.get(TENSOR, 1), mesh_shape.get(CONTEXT, 1)
        return math.lcm(context * tensor, 2 * context if self._ring and context > 1 else 1)

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """Sizes that tensor and context parallelism divide; tiers of offload."""
        if len(spec.computes_in) > 1:
            fsdp_dtypes.check()
        parts = math.prod(size for name, size in mesh_shape.items() if name != REPLICATE)
        offloaded.check(spec, model, parts, gathers=True)
        tensor, context = mesh_shape.get(TENSOR, 1), mesh_shape.get(CONTEXT, 1)
        chunks = 2 * context if self._ring and context > 1 else context
        if sequence_length % chunks:
            what = f"context: {context}" + (", which cuts it into twice as many chunks for a ring" if self._ring else "")
            raise UserError(f"train.sequence_length: {sequence_length} does not divide over sharding.{what}")
        if spec.segments and self._ring and context > 1:
            raise UserError(
                "sharding.context_method: ring sees all of a row, and the rows of this run hold several documents or padding; use heads"
            )
        if tensor > 1:
            plan_for(model, tensor, "sharding.tensor", {"positions of a sequence on a rank": sequence_length // context})
        if context > 1:
            plan = model.whole_tensor_plan()
            heads = plan.sizes.get("attention heads", context) if plan else context
            context_parallel.check(model, context, heads // tensor, self._ring)

    def attention(self, attention: AttentionPlugin, mesh: DeviceMesh | None) -> AttentionPlugin:
        """One that brings divided sequences together."""
        if (context := _dimension(mesh, CONTEXT)) is None:
            return attention
        made = context_parallel.PassedKeys if self._ring else context_parallel.ExchangedHeads
        self._attention = made(attention, context)
        return self._attention

    @property
    def _ring(self) -> bool:
        return self.config.context_method == "ring"

    def local_batch(self, batch: dict[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
        """Some positions, where sequences are divided."""
        context = _dimension(mesh, CONTEXT)
        return batch if context is None else context_parallel.local_batch(batch, context, self._ring)

    def parallelize(self, model: CausalLM, mesh: DeviceMesh | None) -> None:
        """By the model's plan."""
        assert mesh is not None
        self._parameter_mesh = _parameter_mesh(mesh)
        if self._attention is not None:
            model.register_forward_pre_hook(self._attention.knows_positions, with_kwargs=True)
            model.over_ranks = self._attention.over_ranks
        if (tensor := _dimension(self._parameter_mesh, TENSOR)) is not None:
            plan = model.whole_tensor_plan()
            assert plan is not None, "check comes first"
            tensor_parallel.parallelize(model, plan, tensor)

    def traced(self, spec: StepSpec) -> AbstractContextManager[object]:
        """Without files."""
        return offloaded.without_files()

    def shard(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> None:
        """Each block is a unit, and so are embedding and head where they do not share their weights; the rest forms the last one."""
        assert self._parameter_mesh is not None
        names = self._parameter_mesh.mesh_dim_names or ()
        data = self._parameter_mesh[tuple(name for name in names if name != TENSOR)]
        dtypes = fsdp_dtypes.mixed_precision(spec.precision)
        reshard = self.config.reshard_after_forward
        # Parameters on the host take gradients and the step with them. On the CPU they are there already.
        tier = CPUOffloadPolicy(pin_memory=True) if _on_host(spec) else OffloadPolicy()
        unit = partial(fully_shard, mesh=data, mp_policy=dtypes, offload_policy=tier)
        for block in model.blocks:
            unit(block, reshard_after_forward=reshard)
        if (embedding := model.own_embedding) is not None:
            looked_up = type(embedding) is nn.Embedding  # whose backward needs no weights
            gathered = unit(embedding, reshard_after_forward=True if looked_up else reshard)
            gathered.set_unshard_in_backward(not looked_up)
        # Backward begins where forward ended: giving the head back in between would only gather it twice.
        alone = _head_alone(model, unit)
        unit(model, reshard_after_forward=False, ignored_params=alone)
        model.register_forward_hook(_give_back)
        self._prefetch([block for block in model.blocks if isinstance(block, FSDPModule)])

    def _prefetch(self, blocks: list[FSDPModule]) -> None:
        ahead, behind = self.config.forward_prefetch, self.config.backward_prefetch
        for number, block in enumerate(blocks):
            if ahead:
                block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + ahead])
            if behind > 1:  # one is what FSDP does by itself
                block.set_modules_to_backward_prefetch(blocks[max(0, number - behind) : number][::-1])

    def start(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec, device: torch.device, give: Give) -> Stepper:
        """Parameters that are offloaded get their storage on the host; buffers are where the model computes."""
        if not _on_host(spec):
            return super().start(model, mesh, spec, device, give)
        model.materialise(torch.device("cpu"))
        give(model.stored())
        for module in model.modules():
            module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})
        return self.stepper(model, mesh, spec)

    def stepper(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> Stepper:
        """The plain step over sharded gradients."""
        assert mesh is not None
        tensor = _size(mesh, TENSOR)
        return _FSDPStepper(model, spec, mesh.size() // tensor, tensor, self._attention)


class _FSDPStepper(TorchStepper):
    def __init__(
        self, model: CausalLM, spec: StepSpec, replicas: int, tensor: int, attention: context_parallel.DividedSequences | None
    ) -> None:
        super().__init__(model, spec, replicas)
        self.length_multiple = tensor
        self._attention = attention

    def forward_context(self) -> AbstractContextManager[object]:
        # The mixed-precision policy casts each block's parameters as it gathers them.
        return nullcontext()

    def evaluation(self) -> AbstractContextManager[object]:
        # Forward sees gathered weights, and all that passes between blocks, in the compute dtype anyway.
        return nullcontext()

    def change_precision(self, policy: PrecisionPolicy) -> None:
        super().change_precision(policy)
        fsdp_dtypes.change(self._model, policy)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        with tensor_parallel.divided_logits if self.length_multiple > 1 else nullcontext():
            yield

    def whole_sequences(self) -> AbstractContextManager[object]:
        return self._attention.whole_sequences() if self._attention else nullcontext()


def _on_host(spec: StepSpec) -> bool:
    return spec.offload.params == "cpu" and spec.device_type == "cuda"


def _parameter_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """What parameters are divided over: ranks that divide sequences divide parameters as well."""
    if _dimension(mesh, CONTEXT) is None:
        return mesh
    sizes = {name: _size(mesh, name) for name in mesh.mesh_dim_names or ()}
    sizes[SHARD] *= sizes.pop(CONTEXT)
    return init_device_mesh(mesh.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _dimension(mesh: DeviceMesh | None, name: str) -> DeviceMesh | None:
    return mesh[name] if mesh is not None and name in (mesh.mesh_dim_names or ()) else None


def _size(mesh: DeviceMesh, name: str) -> int:
    """Ranks along a dimension; 1 where the mesh has no such."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


class _Around(nn.Module):
    """Gathers a module's weights around what uses them without calling it: hooks of FSDP2 are those of a call."""

    def __init__(self, module: nn.Module, call: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.forward = call


def _head_alone(model: CausalLM, unit: Callable[..., FSDPModule]) -> set[nn.Parameter]:
    """Make a unit of the model's head, if it can be one; returns its parameters."""
    if (head := model.own_head) is None:
        return set()
    around = _Around(head, model.around_head)
    unit(around, reshard_after_forward=False)
    del around.module  # the model has it under its own name
    model.add_module("gathered_head", around)
    model.around_head = around.__call__
    return set(head.parameters())


def _give_back(model: nn.Module, *_: object) -> None:
    """After a forward that no backward follows, parameters go back to being shards; else a checkpoint after a validation would find whole
    ones, in the compute dtype, that the optimizer does not know."""
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
