"""Gradients that stay in 16 bits until the update, where widening them before it changes no number.

Backward's products of 16-bit factors give a gradient in 16 bits, which autocast then widens to the parameter's dtype: three times its bytes
are read and written, and twice are kept. One micro-batch and one use of a weight leave nothing to add to it, so that whoever updates may as
well widen it as it is read. (Within one call of a compiled block several uses are added up in 16 bits, as autocast does it whose cache
has one copy of a weight for all of them.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """The linear layers of blocks; compiled ones are given their weights from outside, so that it is not their graphs that widen."""
    for block in model.blocks:
        layers = [module for module in block.modules() if type(module) is nn.Linear and module.weight.requires_grad]
        if block._compiled_call_impl is not None:
            block._compiled_call_impl = GivenWeights(block._compiled_call_impl, layers)
            continue
        for layer in layers:
            layer.__class__ = NarrowLinear


class Uses:
    """Of a weight in a step; its gradient is in 16 bits where that is one."""

    def __init__(self, weight: Tensor) -> None:
        self._weight, self.count = weight, 0
        weight.grad_dtype = torch.bfloat16

    def use(self) -> None:
        """Once more; what is computed again for backward is no further use."""
        if torch._C._current_graph_task_id() == -1:
            self.count += 1
            if self.count == 2:
                self._weight.grad_dtype = self._weight.dtype

    def given(self, gradient: Tensor) -> Tensor:
        """A use's gradient as the weight gets it: of several, the sum is in its own dtype."""
        return gradient.to(self._weight.dtype) if self.count > 1 else gradient


class NarrowLinear(nn.Linear):
    """A linear layer under autocast whose weight's gradient is in its dtype: of a weight that is used once before backward."""

    uses: Uses | None = None

    def begin(self) -> None:
        """A forward of another step."""
        self.uses = Uses(self.weight)

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        if self.uses is None or not (_applies(self.weight) and of_cpu(x_I)):
            return super().forward(x_I)
        self.uses.use()
        out_O: Tensor = _Linear.apply(x_I.to(torch.get_autocast_dtype("cpu")), self.weight, self.bias, self.uses)
        return out_O


class GivenWeights:
    """A compiled block's call, whose linear layers' weights are cast before it, and get the gradients that its graph has for the casts: a
    graph that has the weights themselves widens what it gives them."""

    def __init__(self, call: Callable[..., Any], layers: Sequence[nn.Linear]) -> None:
        self._call, self._layers = call, layers
        self.uses: list[Uses] = []

    def begin(self) -> None:
        """A forward of another step."""
        self.uses = [Uses(layer.weight) for layer in self._layers]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the block's."""
        if not self.uses or not all(_applies(layer.weight) for layer in self._layers):
            return self._call(*args, **kwargs)
        try:
            for layer, uses in zip(self._layers, self.uses, strict=True):
                uses.use()
                layer.__dict__["weight"] = _Cast.apply(layer.weight, uses)  # is found before the parameter
            return self._call(*args, **kwargs)
        finally:
            for layer in self._layers:
                layer.__dict__.pop("weight", None)


def _applies(weight: Tensor) -> bool:
    return torch.is_grad_enabled() and torch.is_autocast_enabled("cpu") and of_cpu(weight)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_OI: Tensor, uses: Uses) -> Tensor:
        ctx.uses = uses
        return weight_OI.to(torch.get_autocast_dtype("cpu"))

    @staticmethod
    def backward(ctx: Any, grad_OI: Tensor) -> tuple[Tensor, None]:
        return ctx.uses.given(grad_OI), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_I: Tensor, weight_OI: Tensor, bias_O: Tensor | None, uses: Uses) -> Tensor:
        narrow_OI = weight_OI.to(x_I.dtype)
        ctx.save_for_backward(x_I, narrow_OI, weight_OI, bias_O)
        ctx.uses = uses
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
        weight_grad_OI = ctx.uses.given(grad_TO.t() @ x_I.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        return dx_I, weight_grad_OI, grad_TO.sum(0) if ctx.needs_input_grad[2] else None, None


class NarrowStepper(TorchStepper):
    """Of a model that was narrowed."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """The one of a step."""
        for block in self._model.blocks:
            if isinstance(given := block._compiled_call_impl, GivenWeights):
                given.begin()
            else:
                for module in block.modules():
                    if isinstance(module, NarrowLinear):
                        module.begin()
        return super().micro_batch(last)
