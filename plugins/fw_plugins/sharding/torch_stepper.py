"""The step over plain torch optimizers: what single, ddp and fsdp share, and where each differs is a method."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fw.api import (
    CausalLM,
    Give,
    KeptTensors,
    LossScaling,
    OffloadPolicy,
    OptimizerSpec,
    PrecisionPolicy,
    RunError,
    Stepper,
    StepResult,
    StepSpec,
    on_gpu,
)
from fw_plugins.sharding.evaluating import weights_in
from fw_plugins.sharding.norm import GradientNorm, global_norm
from fw_plugins.sharding.offloaded import OffloadedOptimizer, placed_like
from fw_plugins.sharding.parts import local_part

_LEAST_SCALE = 2.0**-20


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    undecayed: Collection[str],
    weight_decay: float,
    matrices: Collection[nn.Parameter] = frozenset(),
) -> list[dict[str, Any]]:
    """What an optimizer takes: the parameters that decay and those that do not; no empty group, nothing frozen.

    Args:
        matrices: have a group of their own.
    """
    trained = [(name, p) for name, p in named if p.requires_grad]
    own = [p for name, p in trained if p in matrices and name not in undecayed]
    trained = [(name, p) for name, p in trained if p not in matrices or name in undecayed]
    groups = [
        {"params": own, "weight_decay": weight_decay, "matrix": True},
        {"params": [p for name, p in trained if name not in undecayed], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name in undecayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class LossScale:
    """The state of dynamic loss scaling."""

    def __init__(self, scaling: LossScaling | None) -> None:
        self.scaling = scaling
        self.value = scaling.initial_scale if scaling else 1.0
        self.good_steps = 0

    def update(self, finite: bool) -> None:
        """Halve after an overflow, double after a long enough run of good steps."""
        assert self.scaling is not None
        if not finite:
            self.value, self.good_steps = self.value / 2, 0
            if self.value < _LEAST_SCALE:
                raise RunError(
                    f"the gradient is not finite at a loss scale of {self.value:.1e} either: the loss itself diverges; lower optimizer.lr"
                )
            return
        self.good_steps += 1
        if self.good_steps == self.scaling.growth_interval:
            self.value, self.good_steps = self.value * 2, 0


def begin(optimizer: torch.optim.Optimizer) -> None:
    """Call ``begin`` of an optimizer that has one (:class:`OptimizerSpec`)."""
    if hasattr(optimizer, "begin"):
        optimizer.begin()


def _place(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str, value: Tensor) -> None:
    """State from a checkpoint, where the optimizer wants it."""
    place = getattr(optimizer, "place", None)
    optimizer.state[parameter][key] = value if place is None else place(parameter, key, value)


class WholeOptimizer:
    """One torch optimizer over all parameters, where they are."""

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec, policy: OffloadPolicy) -> None:
        self._optimizer = spec.cls(groups, lr=spec.lr, **spec.arguments)

    def set_lr(self, lr: float) -> None:
        """For the next step."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self, grads: Mapping[nn.Parameter, Tensor], factor: Tensor | None = None) -> None:
        """Update by the parameters' ``.grad``, of which ``grads`` are this rank's parts.

        Args:
            factor: what gradients are multiplied by, a scalar in fp32; ``grads`` may be so afterwards.
        """
        if factor is not None:
            if hasattr(self._optimizer, "grad_factor"):
                self._optimizer.grad_factor = factor
            else:
                torch._foreach_mul_(list(grads.values()), factor)
        self._optimizer.step()

    def weights_changed(self) -> None:
        """There is no other copy of them."""

    def begin(self) -> None:
        """Make the state there is before the first step, where the optimizer has a way to."""
        begin(self._optimizer)

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Tensors by key."""
        return {key: value for key, value in self._optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor)}

    def load(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Take back what :meth:`state` gave."""
        _place(self._optimizer, parameter, key, value)


class SeparateOptimizers(WholeOptimizer):
    """A torch optimizer per parameter, where it is: each may be stepped by itself."""

    def __init__(self, groups: list[dict[str, Any]], spec: OptimizerSpec, policy: OffloadPolicy) -> None:
        self._each = {
            parameter: spec.cls([{**group, "params": [parameter]}], lr=spec.lr, **spec.arguments)
            for group in groups
            for parameter in group["params"]
        }

    def set_lr(self, lr: float) -> None:
        """For the next step."""
        for optimizer in self._each.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def step(self, grads: Mapping[nn.Parameter, Tensor], factor: Tensor | None = None) -> None:
        """Update these parameters, by ``.grad`` where they have it; else a copy in their own dtype takes that place for a moment."""
        if factor is not None:
            torch._foreach_mul_(list(grads.values()), factor)
        for parameter, grad in grads.items():
            if parameter.grad is not None:
                self._each[parameter].step()
                continue
            parameter.grad = placed_like(parameter, grad.to(parameter.dtype))
            self._each[parameter].step()
            parameter.grad = None

    def begin(self) -> None:
        """Make the state there is before the first step, where the optimizer has a way to."""
        for optimizer in self._each.values():
            begin(optimizer)

    def state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Tensors by key."""
        state = self._each[parameter].state.get(parameter, {})
        return {key: value for key, value in state.items() if isinstance(value, Tensor)}

    def load(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Take back what :meth:`state` gave."""
        _place(self._each[parameter], parameter, key, value)


class TorchStepper(Stepper):
    """Autograd, one torch optimizer, clipping by the global norm. ``replicas`` ranks average their gradients, so losses are scaled up."""

    def __init__(self, model: CausalLM, spec: StepSpec, replicas: int = 1) -> None:
        self._model = model
        self._policy = spec.precision
        self._weights_converted = False
        self._clip_norm = spec.clip_norm
        self._replicas = replicas
        self._scale = LossScale(spec.precision.loss_scaling)
        self._lr = spec.optimizer.lr
        self._device = next(model.parameters()).device
        of_blocks = {p for block in model.blocks for p in block.parameters() if p.dim() >= 2} if spec.optimizer.matrices else frozenset()
        groups = parameter_groups(model.named_parameters(), model.whole_undecayed(), spec.optimizer.weight_decay, of_blocks)
        self._in_backward = spec.optimizer.in_backward
        apart = spec.precision.accumulates_apart and spec.offload.gradients == "device"
        on_device = SeparateOptimizers if self._in_backward or apart else WholeOptimizer
        make = on_device if spec.offload.optimizer == "device" else OffloadedOptimizer
        self._optimizer = make(groups, spec.optimizer, spec.offload)
        self._norm = GradientNorm()
        self._trained = [p for group in groups for p in group["params"]]
        self._gradients_on_host = spec.offload.gradients == "cpu"
        self._stashed: dict[nn.Parameter, Tensor] = {}
        """This rank's parts of gradients that are not in ``.grad``: on the host, or in a dtype of their own."""
        self._keeps_apart = self._gradients_on_host or apart
        when_there = self._update if self._in_backward else self._sum_up if apart else None
        self._hooks = [p.register_post_accumulate_grad_hook(when_there) for p in self._trained if when_there is not None]

    @property
    def module(self) -> nn.Module:
        """The model, unwrapped."""
        return self._model

    @property
    def lr(self) -> float:
        """The specification's learning rate."""
        return self._lr

    def forward_context(self) -> AbstractContextManager[object]:
        """Autocast where compute has another dtype than the parameters; without a cache, which would hold on to copies of weights that
        recomputation lets go, and a forward uses each once."""
        if self._policy.compute == self._policy.parameters or self._weights_converted:
            return nullcontext()
        return torch.autocast(self._device.type, dtype=self._policy.compute, cache_enabled=False)

    def evaluation(self) -> AbstractContextManager[object]:
        """Weights converted, where the policy wants that; those proper wait on the host where the device is another."""
        wanted = self._policy.full_eval and self._policy.compute != self._policy.parameters
        return self._converted() if wanted else nullcontext()

    @contextmanager
    def _converted(self) -> Iterator[None]:
        with weights_in(self._model, self._policy.compute, leave_device=self._device.type != "cpu"):
            self._weights_converted = True
            try:
                yield
            finally:
                self._weights_converted = False

    def change_precision(self, policy: PrecisionPolicy) -> None:
        """Autocast to another dtype, or none."""
        self._policy = policy

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Nothing to hold back."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Accumulate into ``.grad``, or on the host."""
        (loss * (self._scale.value * self._replicas)).backward()
        if self._gradients_on_host:
            self._stash()

    def begin_step(self, lr_factor: float) -> None:
        """What is updated in backward needs the learning rate before."""
        self._optimizer.set_lr(self._lr * lr_factor)

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        """The gradient of a parameter is there."""
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        grad = local_part(parameter.grad)
        self._norm.add({parameter: grad})
        self._optimizer.step({parameter: grad})
        parameter.grad = None

    @torch.no_grad()
    def _sum_up(self, parameter: Tensor) -> None:
        """The gradient of a parameter is there; it goes into a sum of another dtype."""
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        grad = local_part(parameter.grad)
        if parameter in self._stashed:
            self._stashed[parameter] += grad
        else:
            self._stashed[parameter] = grad.to(self._policy.accumulate)
        parameter.grad = None

    def _stash(self) -> None:
        for parameter, grad in self._gradients().items():
            if parameter in self._stashed:
                self._stashed[parameter] += grad.to("cpu")
            else:
                dtype = self._policy.accumulate or grad.dtype
                self._stashed[parameter] = torch.empty_like(grad, dtype=dtype, device="cpu", pin_memory=on_gpu(grad)).copy_(grad)
            parameter.grad = None

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        """This rank's parts."""
        return {p: local_part(p.grad) for p in self._trained if p.grad is not None}

    def step(self, lr_factor: float) -> StepResult:
        """Norm, clip, update, drop the gradients."""
        if self._in_backward:
            return StepResult(self._norm.take())
        grads = self._stashed if self._keeps_apart else self._gradients()
        norm = global_norm(grads) / self._scale.value
        finite = bool(norm.isfinite())  # the one synchronisation with the device: nothing brings weights back that are NaN
        unscale = 1 / self._scale.value
        if self._scale.scaling is not None:
            self._scale.update(finite)
        if not finite:
            self._drop_gradients()
            return StepResult(norm, skipped=True)
        changes = self._clip_norm or self._scale.scaling is not None
        factor = (self._clip_factor(norm) * unscale).to(torch.float32) if changes else None
        self._optimizer.set_lr(self._lr * lr_factor)
        self._optimizer.step(grads, factor)
        self._drop_gradients()
        return StepResult(norm)

    def _drop_gradients(self) -> None:
        for parameter in self._trained:
            parameter.grad = None
        self._stashed = {}

    def _clip_factor(self, norm: Tensor) -> Tensor:
        if not self._clip_norm:
            return torch.ones_like(norm)
        return (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own names."""
        return self._model.named_parameters()

    @torch.no_grad()
    def kept(self) -> KeptTensors:
        """Parts of DTensors as they are."""
        state = [value for p in self._trained for value in self._optimizer.state(p).values()]
        gradients = list((self._stashed if self._keeps_apart else self._gradients()).values())
        weights = [local_part(parameter) for name, parameter in self._model.named_parameters() if self._is_in_memory(name)]
        return KeptTensors(weights, gradients, [local_part(s) for s in state], list(self._model.buffers()))

    def _is_in_memory(self, name: str) -> bool:
        """Whether a parameter is in the device's, if only while its block computes."""
        return name in self._model.elsewhere or name not in self._model.in_files

    @torch.no_grad()
    def kept_by_parameter(self) -> dict[str, KeptTensors]:
        """All but the buffers."""
        gradients = self._stashed if self._keeps_apart else self._gradients()
        found = {}
        for name, parameter in self.parameters():
            gradient = [gradients[parameter]] if parameter in gradients else []
            state = self._optimizer.state(parameter).values() if parameter.requires_grad else ()
            weight = [local_part(parameter)] if self._is_in_memory(name) else []
            found[name] = KeptTensors(weight, gradient, [local_part(value) for value in state])
        return found

    def fill(self, give: Give) -> None:
        """In place, and where the optimizer has copies; what lies in files is as it was."""
        give({name: tensor for name, tensor in self._model.stored().items() if name not in self._model.in_files})
        self._optimizer.weights_changed()

    def placements(self) -> dict[str, Tensor]:
        """Parameters, and the state that the optimizer divides in its own way."""
        self._optimizer.begin()
        return {**dict(self.parameters()), **self.optimizer_tensors()}

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Every tensor of the optimizer's state."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.parameters()
            if parameter.requires_grad
            for key, value in self._optimizer.state(parameter).items()
        }

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put them where the optimizer looks for them."""
        parameters = dict(self.parameters())
        for path, tensor in tensors.items():
            name, _, key = path.rpartition("/")
            self._optimizer.load(parameters[name], key, tensor)

    def close(self) -> None:
        """Parameters would keep the stepper, which keeps them, where no garbage collector looks."""
        for hook in self._hooks:
            hook.remove()

    def scalars(self) -> dict[str, Any]:
        """The loss scale, where there is one."""
        if self._scale.scaling is None:
            return {}
        return {"loss_scale": self._scale.value, "good_steps": self._scale.good_steps}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Take the loss scale back."""
        if self._scale.scaling is not None and "loss_scale" in scalars:
            self._scale.value, self._scale.good_steps = scalars["loss_scale"], scalars["good_steps"]
