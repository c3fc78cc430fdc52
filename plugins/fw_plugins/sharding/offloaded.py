"""Optimizer state on the host or on disk, and the step computed there, one parameter at a time."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fw.api import (
    FROM_DISK,
    TO_DISK,
    CausalLM,
    OffloadPolicy,
    OptimizerSpec,
    RunError,
    StepSpec,
    UserError,
    allow_open_files,
    disk_transfer,
    on_gpu,
)
from fw_plugins.sharding.parts import local_part
from fw_plugins.sharding.space import check_space

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux, which Python's mmap has no name for."""
_AHEAD = 2
"""Gradients that are copied to the host while a parameter is updated there, each in page-locked memory of its size."""


class OffloadedOptimizer:
    """A torch optimizer per parameter, over this rank's part of it in host memory.

    State shaped like a parameter lives in host memory, or in memory mapped from files under
    ``policy.path``, which the kernel writes out: after a parameter's turn its pages are given back, so that host memory holds the state of
    one parameter at a time. Files have no name and vanish with the process. Where parameters are on a GPU the host keeps a copy of them.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], spec: OptimizerSpec, policy: OffloadPolicy) -> None:
        self._path = policy.path if policy.optimizer == "nvme" else None
        if self._path is not None:
            allow_open_files()
        self._each: dict[nn.Parameter, tuple[Tensor, torch.optim.Optimizer]] = {}
        self._mapped: dict[Tensor, dict[str, mmap.mmap]] = {}
        for group in groups:
            for parameter in group["params"]:
                host = _on_host(parameter)
                options = {key: value for key, value in group.items() if key != "params"}
                self._each[parameter] = host, spec.cls([{"params": [host], **options}], lr=spec.lr, **spec.arguments)

    def set_lr(self, lr: float) -> None:
        """For the next step."""
        for _, optimizer in self._each.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def step(self, grads: Mapping[nn.Parameter, Tensor], factor: Tensor | None = None) -> None:
        """Update parameters by this rank's part of their gradients, wherever that is, times ``factor``."""
        if factor is not None:
            torch._foreach_mul_(list(grads.values()), factor)
        for parameter, grad in _arriving(grads):
            host, optimizer = self._each[parameter]
            host.grad = grad.to(host.dtype)
            self._fetch(host)
            optimizer.step()
            host.grad = None
            self._settle(host, optimizer)
            if on_gpu(parameter):
                local_part(parameter.detach()).copy_(host.detach(), non_blocking=True)

    def begin(self) -> None:
        """Make the state there is before the first step, where the optimizer has a way to."""
        for host, optimizer in self._each.values():
            if hasattr(optimizer, "begin"):
                optimizer.begin()
                self._settle(host, optimizer)

    def weights_changed(self) -> None:
        """Copy them to the host again, where they are not there."""
        for parameter, (host, _) in self._each.items():
            local = local_part(parameter.detach())
            if on_gpu(local):
                host.detach().copy_(local)

    def _fetch(self, host: Tensor) -> None:
        """Read a parameter's state in large pieces; the update would page by page, amid its computation."""
        for memory in self._mapped.get(host, {}).values():
            with suppress(OSError), disk_transfer(FROM_DISK, len(memory), self._directory):  # Linux before 5.14 has no way to
                memory.madvise(_POPULATE_WRITE)

    @property
    def _directory(self) -> Path:
        assert self._path is not None
        return self._path

    def _settle(self, host: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """State that the first step has made goes to its tier; pages that are on disk leave memory."""
        if self._path is None:
            return
        if host not in self._mapped:
            self._mapped[host] = {}
            state = optimizer.state[host]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.numel():
                    state[key], self._mapped[host][key] = _to_disk(value, self._path)
        for memory in self._mapped[host].values():
            with disk_transfer(TO_DISK, len(memory), self._path):
                memory.flush()
            memory.madvise(mmap.MADV_DONTNEED)

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Tensors by key; those shaped like the parameter are placed like it."""
        host, optimizer = self._each[parameter]
        return {key: placed_like(parameter, value) for key, value in optimizer.state[host].items() if isinstance(value, Tensor)}

    def load(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Take back what :meth:`state` gave."""
        host, optimizer = self._each[parameter]
        local = local_part(value)
        if not local.dim():
            optimizer.state[host][key] = value.to(host.device)  # which was made beside the parameter
        elif self._path is None or not local.numel():
            optimizer.state[host][key] = local.to(host.device)
        else:  # to the disk at once: all of the state may not fit into host memory
            mapped = self._mapped.setdefault(host, {})
            optimizer.state[host].pop(key, None)  # what it begins with, or had before a roll-back, gives its file's space back first
            mapped.pop(key, None)
            optimizer.state[host][key], memory = _to_disk(local, self._path)
            mapped[key] = memory
            memory.flush()
            memory.madvise(mmap.MADV_DONTNEED)


def _arriving(grads: Mapping[nn.Parameter, Tensor]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Gradients in host memory, in order; a GPU copies some while the parameters before them are updated."""
    waiting: deque[tuple[nn.Parameter, Tensor, torch.cuda.Event | None]] = deque()
    for parameter, grad in grads.items():
        waiting.append((parameter, *_to_host(grad)))
        if len(waiting) > _AHEAD:
            yield _arrived(*waiting.popleft())
    while waiting:
        yield _arrived(*waiting.popleft())


def _to_host(grad: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Where the gradient will be, and what says that it is there; None where it is already."""
    if not on_gpu(grad):
        return grad, None
    copy = torch.empty(grad.shape, dtype=grad.dtype, pin_memory=True).copy_(grad, non_blocking=True)
    return copy, torch.cuda.current_stream(grad.device).record_event() if grad.is_cuda else None


def _arrived(parameter: nn.Parameter, grad: Tensor, there: torch.cuda.Event | None) -> tuple[nn.Parameter, Tensor]:
    if there is not None:
        there.synchronize()
    return parameter, grad


def check(spec: StepSpec, model: CausalLM, parts: int, gathers: bool) -> None:
    """Refuse tiers that the torch optimizers here have no way to, and a disk that does not hold what is to go there.

    Args:
        model: on the meta device.
        parts: how many ranks divide its parameters.
        gathers: whether parameters are gathered block by block.

    Raises:
        UserError: with what would work.
    """
    policy = spec.offload
    if spec.optimizer.in_backward:
        _check_in_backward(spec, gathers)
    if policy.params_in_files:
        _check_in_files(gathers)
    elif policy.params == "cpu" and not gathers and spec.device_type != "cpu" and model.adapters is not None:
        pass  # frozen ones are brought from there
    elif policy.params == "nvme" or (policy.params == "cpu" and not gathers):
        does = "zero with stage 3" if policy.params == "nvme" else "fsdp, or zero with stage 3"
        raise UserError(f"offload.params: {policy.params} needs sharding that brings parameters block by block from there; use {does}")
    if policy.params == "cpu" and gathers and (policy.budget is not None or policy.modules):
        name = "budget" if policy.budget is not None else "modules"
        raise UserError(f"offload.{name}: fsdp brings all parameters from host memory; leave it out, or use sharding=ddp or single")
    if policy.params == "cpu" and gathers and (policy.optimizer == "device" or policy.gradients == "device"):
        raise UserError(
            "offload.params: fsdp keeps gradients and optimizer state beside them; set offload.gradients and offload.optimizer to cpu"
        )
    if policy.gradients == "cpu" and policy.optimizer == "device":
        raise UserError("offload.gradients: cpu needs a step computed there; set offload.optimizer: cpu or nvme")
    if spec.optimizer.state == "whole" and policy.optimizer != "device" and gathers:
        raise UserError(
            f"offload.optimizer: {policy.optimizer} steps each rank's part of a parameter by itself, and this optimizer needs all of it;"
            " use offload.optimizer=device, or an optimizer whose update is by elements or rows (adamw, lion, adamw_8bit)"
        )
    if policy.path is not None and spec.is_here:
        elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        state = _state_bytes(spec.optimizer, spec.precision.parameters) if policy.optimizer == "nvme" else 0
        check_space(policy.path, math.ceil(elements / parts * state), spec.ranks_per_host)


def _check_in_files(gathers: bool) -> None:
    """Whole matrices are in files."""
    if gathers:
        raise UserError(
            "offload.params: nvme leaves whole matrices in the model's files, and fsdp divides them between ranks; use sharding=ddp, whose"
            " ranks read the same files"
        )


def _check_in_backward(spec: StepSpec, gathers: bool) -> None:
    """What needs all gradients at once cannot be had where none outlives its update."""
    stands_against = {
        "accumulates gradients over micro-batches (train.micro_batch_size, train.max_tokens_per_batch)": spec.accumulation != 1,
        "clips by the norm of all gradients (train.gradient_clip_norm)": spec.clip_norm > 0,
        "scales the loss and looks for overflow in all gradients (precision.fp16)": spec.precision.loss_scaling is not None,
        "takes gradients to the host (offload.gradients)": spec.offload.gradients != "device",
        "needs all ranks for an update, amid the collectives of backward": spec.optimizer.state == "whole" and gathers,
    }
    for what, is_so in stands_against.items():
        if is_so:
            raise UserError(
                f"optimizer.in_backward updates each parameter as its gradient comes, and the run {what}; switch one of them off"
            )


def _state_bytes(spec: OptimizerSpec, dtype: torch.dtype) -> float:
    """Bytes of state per element of a parameter, found by stepping a small one."""
    small = nn.Parameter(torch.zeros(64, 256, dtype=dtype))
    small.grad = torch.zeros_like(small)
    optimizer = spec.cls([small], lr=0.0, **spec.arguments)
    optimizer.step()
    return sum(v.nbytes for v in optimizer.state[small].values() if isinstance(v, Tensor) and v.dim()) / small.numel()


def _on_host(parameter: nn.Parameter) -> Tensor:
    """This rank's part itself where it is in host memory, else a page-locked copy."""
    local = local_part(parameter.detach())
    if on_gpu(local):
        local = torch.empty(local.shape, dtype=local.dtype, pin_memory=True).copy_(local)
    return local.requires_grad_()


def placed_like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """What an optimizer keeps of this rank's rows; the last dimension may be another one."""
    local = local_part(parameter)
    if not isinstance(parameter, DTensor) or value.dim() != local.dim():
        return value
    last = parameter.shape[-1] * value.shape[-1] // max(1, local.shape[-1])
    shape = torch.Size((*parameter.shape[:-1], last))
    mesh, placements, stride = parameter.device_mesh, parameter.placements, torch.empty(shape, device="meta").stride()
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)


@contextmanager
def without_files() -> Iterator[None]:
    """Within it what would go to a disk goes nowhere: nothing is written, and none of it is the allocator's. For plans, where tensors
    have no bytes."""
    with patch(f"{__name__}._to_disk", _to_nowhere):
        yield


class _Nowhere:
    """In place of mapped memory."""

    def __len__(self) -> int:
        return 0

    def flush(self) -> None:
        """There is nothing to write."""

    def madvise(self, advice: int) -> None:
        """There are no pages."""


def _to_nowhere(value: Tensor, directory: Path) -> tuple[Tensor, Any]:
    value.untyped_storage().resize_(0)
    return value, _Nowhere()


def _to_disk(value: Tensor, directory: Path) -> tuple[Tensor, mmap.mmap]:
    """A copy in memory mapped from a file without a name, whose space is reserved."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, value.nbytes)
            memory = mmap.mmap(file.fileno(), value.nbytes)
    except OSError as error:
        raise RunError(f"offload.path: {directory}: {error.strerror}; the optimizer's state does not fit") from None
    mapped = torch.frombuffer(memory, dtype=value.dtype).view(value.shape)
    return mapped.copy_(value), memory
