"""Layers divided between ranks (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), and what lies between them divided along the
sequence (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198). Which layers, and how, is the model's plan.

Parameters are DTensors; while a unit computes, it sees this rank's part as a plain tensor, so that any operation works on it. The
sequence is gathered before an attention or a feed-forward network and summed and scattered after it. In between, every gradient of what
the ranks hold alike is a part of a sum: that sum is taken where the gradient leaves, by the scatter or by the parameter.

T ranks; l = L ÷ T, the positions of one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from fw.api import CausalLM, Head, Readout, TensorPlan, fits, given
from fw_plugins.sharding.collectives import all_gather, reduce_scatter


def parallelize(model: CausalLM, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Divide ``model``, on the meta device, over the one dimension of ``mesh``."""
    for name, module in list(model.named_modules()):
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            split = given(plan.split, f"{name}.{parameter_name}".lstrip("."))
            placement = Replicate() if split is None else Shard(split)
            divided = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            module.register_parameter(parameter_name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
    for name, module in model.named_modules():
        if fits(plan.whole_input, name):
            module.register_forward_pre_hook(lambda _, args: (_gathered(args[0], mesh), *args[1:]))
        if fits(plan.partial_output, name):
            module.register_forward_hook(lambda _, args, output: _summed(output, mesh))
        if fits(plan.whole_output, name):
            module.register_forward_hook(lambda _, args, output: _gathered(output, mesh))
        if fits(plan.repeated_output, name):
            module.register_forward_hook(lambda _, args, output: _cut(output, mesh))
        if (parts := given(plan.fused, name)) is not None:
            module.register_forward_hook(lambda _, args, output, parts=parts: _regrouped(output, parts, mesh))
        if fits(plan.vocabulary, name):
            assert isinstance(module, nn.Embedding)
            module.forward = _VocabularyRows(module, mesh)  # type: ignore[method-assign, assignment]
    once = {id(p) for name, p in model.named_parameters() if fits(plan.once, name)}
    units = [*model.blocks, *filter(None, [model.own_embedding])]
    for unit in units:
        unit.forward = _on_local_parts(unit.forward, list(unit.modules()), once, mesh)
    if (head := model.own_head) is not None:
        model.around_head = _on_local_parts(model.around_head, list(head.modules()), once, mesh)
        units.append(head)
    inside = {id(module) for unit in units for module in unit.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    forward = _on_local_parts(model.forward, outside, once, mesh)
    model.forward = _with_divided_logits(forward, model.vocab_size, mesh)  # type: ignore[method-assign]


class DividedLogits:
    """Entered around forward and backward: cross-entropy is computed on logits of which each rank holds some of the vocabulary."""

    def __init__(self) -> None:
        self._depth = 0
        self._contexts = ExitStack()

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._contexts.enter_context(loss_parallel())
            self._contexts.enter_context(implicit_replication())

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._contexts.close()


divided_logits = DividedLogits()


def _gathered(x_BlD: Tensor, mesh: DeviceMesh) -> Tensor:
    """``[B, L, D]``; its gradient is this rank's part of a sum."""
    return all_gather(x_BlD, 1, mesh)


def _summed(output: Any, mesh: DeviceMesh) -> Any:
    """Parts of a sum ``[B, L, D]`` → ``[B, l, D]``. What stands beside it (a router's logits) all ranks have alike, and its gradient."""
    if isinstance(output, tuple):
        return (_summed(output[0], mesh), *(_ScaledGradient.apply(other, 1 / mesh.size()) for other in output[1:]))
    return reduce_scatter(output, 1, mesh)


def _cut(x_BLD: Tensor, mesh: DeviceMesh) -> Tensor:
    return x_BLD.chunk(mesh.size(), dim=1)[mesh.get_local_rank()]


def _regrouped(output_BLF: Tensor, parts: int, mesh: DeviceMesh) -> Tensor:
    """The features of several projections in one, of which this rank holds consecutive ones → its share of each of them."""
    whole_BLF = all_gather(output_BLF, 2, mesh)
    shares = whole_BLF.unflatten(-1, (parts, mesh.size(), -1))
    return shares[:, :, :, mesh.get_local_rank()].flatten(2)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _VocabularyRows:
    """Looking up an embedding of which a rank holds some rows: the others' tokens are zero, and the sum over ranks is scattered."""

    def __init__(self, module: nn.Embedding, mesh: DeviceMesh) -> None:
        self._module, self._mesh = module, mesh
        self._first = -(-module.num_embeddings // mesh.size()) * mesh.get_local_rank()  # as DTensor cuts: the last part may be smaller

    def __call__(self, ids_BL: Tensor) -> Tensor:
        if ids_BL.shape[1] % self._mesh.size():
            raise ValueError(f"{ids_BL.shape[1]} positions do not divide between {self._mesh.size()} ranks")
        weight_vD, padding = self._module.weight, self._module.padding_idx
        rows_BL = ids_BL - self._first
        mine_BL = (rows_BL >= 0) & (rows_BL < weight_vD.shape[0])
        if padding is not None:
            padding = padding - self._first if 0 <= padding - self._first < weight_vD.shape[0] else None
        x_BLD = F.embedding(torch.where(mine_BL, rows_BL, 0), weight_vD, padding)
        return _summed(x_BLD.masked_fill(~mine_BL[..., None], 0), self._mesh)


def _on_local_parts(forward: Callable[..., Any], modules: list[nn.Module], once: set[int], mesh: DeviceMesh) -> Callable[..., Any]:
    """``forward`` with this rank's parts in the places of the parameters of ``modules``."""
    owners = [(module, name, id(p) in once) for module in modules for name, p in module.named_parameters(recurse=False)]

    @contextmanager
    def local_parts() -> Iterator[None]:
        kept = [module._parameters[name] for module, name, _ in owners]
        for (module, name, added_once), parameter in zip(owners, kept, strict=True):
            module._parameters[name] = _local(parameter, added_once, mesh)  # type: ignore[assignment]
        try:
            yield
        finally:
            for (module, name, _), parameter in zip(owners, kept, strict=True):
                module._parameters[name] = parameter

    def on_local_parts(*args: Any, **kwargs: Any) -> Any:
        with local_parts():
            return forward(*args, **kwargs)

    return on_local_parts


def _local(parameter: Tensor | None, once: bool, mesh: DeviceMesh) -> Tensor:
    assert isinstance(parameter, DTensor)
    held_alike = parameter.placements[0].is_replicate()
    local = parameter.to_local(grad_placements=[Partial() if held_alike else parameter.placements[0]])
    return local / mesh.size() if once else local


def _with_divided_logits(forward: Callable[..., Tensor], vocabulary: int, mesh: DeviceMesh) -> Callable[..., Tensor]:
    """``forward`` whose head gives the readout logits divided along the vocabulary, and whose result is a plain tensor."""

    def as_divided(logits: Tensor) -> DTensor:
        shape = torch.Size((*logits.shape[:-1], vocabulary))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(logits.contiguous(), mesh, [Shard(logits.dim() - 1)], run_check=False, shape=shape, stride=stride)

    def divided(head: Head) -> Head:
        return lambda x: as_divided(head(x))

    def with_divided_logits(*args: Any, readout: Readout | None = None, **kwargs: Any) -> Tensor:
        if readout is None:
            return as_divided(forward(*args, **kwargs)).full_tensor()

        def read(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            if auxiliary is not None:  # added to a DTensor, it would get a DTensor for a gradient
                auxiliary = DTensor.from_local(auxiliary, mesh, [Replicate()], run_check=False)
            with divided_logits:
                out = readout(x_BLD, divided(head), auxiliary)
            return out.full_tensor().clone() if isinstance(out, DTensor) else out  # FSDP warns of views

        return forward(*args, readout=read, **kwargs)

    return with_divided_logits
