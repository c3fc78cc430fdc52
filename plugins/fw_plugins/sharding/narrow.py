"""Gradients that stay in 16 bits until the update, where widening them before it changes no number.

Backward's products of 16-bit factors give a gradient in 16 bits, which autocast then widens to the parameter's dtype: three times its bytes
are read and written, and twice are kept. One micro-batch and one use of a weight leave nothing to add to it, so that whoever updates may as
well widen it as it is read.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.api import CausalLM, StepSpec
from fw.api.kernels import by_torch, of_cpu
from fw_plugins.sharding.torch_stepper import TorchStepper


def fits(spec: StepSpec) -> bool:
    """Whether a step has one micro-batch in bf16, and whoever updates reads gradients in either dtype."""
    policy, offload = spec.precision, spec.offload
    by_autocast = policy.parameters == torch.float32 and spec.computes_in == {torch.bfloat16}
    kept = policy.accumulate in (None, torch.float32) and offload.params == offload.gradients == offload.optimizer == "device"
    read = getattr(spec.optimizer.cls, "reads_narrow_gradients", False) and not spec.optimizer.in_backward
    return by_autocast and kept and read and spec.accumulation == 1 and spec.device_type == "cpu" and hasattr(Tensor, "grad_dtype")


def narrow(model: CausalLM) -> None:
    """Linear layers of blocks that are not compiled, which see to their gradients themselves."""
    for block in model.blocks:
        if block._compiled_call_impl is None:
            for module in block.modules():
                if type(module) is nn.Linear and module.weight.requires_grad:
                    module.__class__ = NarrowLinear


class NarrowLinear(nn.Linear):
    """A linear layer under autocast whose weight's gradient is in its dtype: of a weight that is used once before backward."""

    uses = 0

    def begin(self) -> None:
        """A forward of another step."""
        self.uses = 0
        self.weight.grad_dtype = torch.bfloat16

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        if not (torch.is_grad_enabled() and torch.is_autocast_enabled("cpu") and of_cpu(x_I, self.weight)):
            return super().forward(x_I)
        if torch._C._current_graph_task_id() == -1:  # else it is computed again for backward, which is no further use
            self.uses += 1
            if self.uses == 2:
                self.weight.grad_dtype = self.weight.dtype
        out_O: Tensor = _Linear.apply(x_I.to(torch.get_autocast_dtype("cpu")), self.weight, self.bias, self)
        return out_O


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, layer: NarrowLinear) -> Tensor:
        narrow_OI = weight_OI.to(x_I.dtype)
        ctx.save_for_backward(x_I, narrow_OI, weight_OI, bias_O)
        ctx.layer = layer
        return F.linear(x_I, narrow_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad_O: Tensor) -> tuple[Tensor | None, ...]:
        x_I, narrow_OI, weight_OI, bias_O = ctx.saved_tensors
        if torch.is_grad_enabled():

            def compute(x_I: Tensor, weight_OI: Tensor, *bias: Tensor) -> Tensor:
                return F.linear(x_I.float(), weight_OI, *bias)

            given = (x_I, weight_OI) if bias_O is None else (x_I, weight_OI, bias_O)
            return *by_torch(compute, given, grad_O), *((None,) if bias_O is None else ()), None
        grad_TO = grad_O.flatten(0, -2)
        dx_I = (grad_TO @ narrow_OI).view(x_I.shape) if ctx.needs_input_grad[0] else None
        weight_grad_OI = grad_TO.t() @ x_I.flatten(0, -2) if ctx.needs_input_grad[1] else None
        if weight_grad_OI is not None and ctx.layer.uses > 1:  # of several, the sum is in the weight's own dtype
            weight_grad_OI = weight_grad_OI.to(weight_OI.dtype)
        return dx_I, weight_grad_OI, grad_TO.sum(0) if ctx.needs_input_grad[2] else None, None


class NarrowStepper(TorchStepper):
    """Of a model that was narrowed."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """The one of a step."""
        for module in self._model.modules():
            if isinstance(module, NarrowLinear):
                module.begin()
        return super().micro_batch(last)
