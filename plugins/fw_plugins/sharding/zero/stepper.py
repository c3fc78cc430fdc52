"""The step by DeepSpeed's engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fw.api import Give, Kept, KeptTensors, Piece, RunError, Stepper, StepResult, StepSpec
from fw_plugins.sharding.zero import engine as own_engine
from fw_plugins.sharding.zero.disk import OwnDirectory
from fw_plugins.sharding.zero.fragments import Flats
from fw_plugins.sharding.zero.placing import fill_frozen


class ZeroStepper(Stepper):
    """DeepSpeed's engine behind the contract: it averages over ranks and would divide by micro-batches, which both are undone.

    Args:
        engine: as ``deepspeed.initialize`` returned it, without values.
        named: the model's parameters, in its order.
        shapes: of the whole parameters.
        files: for the run directory.
        nvme: this rank's own directory, removed at the end; None where nothing is on a disk.
    """

    def __init__(
        self,
        engine: Any,
        named: Sequence[tuple[str, nn.Parameter]],
        shapes: dict[str, torch.Size],
        spec: StepSpec,
        files: Mapping[str, str],
        nvme: OwnDirectory | None,
    ) -> None:
        self._engine = engine
        self._named = list(named)
        self._spec = spec
        self._files = files
        self._nvme = nvme
        self._ranks = dist.get_world_size()
        self._scaling = spec.precision.loss_scaling
        trained = [(name, parameter) for name, parameter in self._named if parameter.requires_grad]
        self._frozen = {name: (parameter, shapes[name]) for name, parameter in self._named if not parameter.requires_grad}
        self._flats = Flats(engine, trained, {name: shapes[name] for name, _ in trained})
        # The engine's own train() and eval() only pass on to the model; who asks the engine for its mode must not be told another one.
        engine.train = lambda mode=True: nn.Module.train(engine, mode)
        engine.eval = lambda: nn.Module.train(engine, False)
        if self._scaling is not None:
            engine.optimizer.loss_scaler.raise_error_at_min_scale = False  # it is said here

    @property
    def module(self) -> nn.Module:
        """The engine, which gathers what forward needs."""
        engine: nn.Module = self._engine
        return engine

    @property
    def lr(self) -> float:
        """The specification's."""
        return self._spec.optimizer.lr

    def forward_context(self) -> AbstractContextManager[object]:
        """Nothing: parameters are in the compute dtype."""
        return nullcontext()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """DeepSpeed is told whether to step after it."""
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        """Backward and reduction."""
        self._engine.backward(loss * self._ranks, scale_wrt_gas=False)

    def step(self, lr_factor: float) -> StepResult:
        """Norm, clip, update, gather."""
        for group in self._engine.basic_optimizer.param_groups:
            group["lr"] = self.lr * lr_factor
        scale = self._engine.optimizer.loss_scale if self._scaling is not None else 0.0
        self._engine.step()
        skipped = not self._engine.was_step_applied()
        if skipped and scale == 1:
            raise RunError("the gradient is not finite at a loss scale of 1 either: the loss itself diverges; lower optimizer.lr")
        # DeepSpeed says -1, infinity or None of a norm that is not finite.
        norm = torch.nan if skipped else self._engine.get_global_grad_norm()
        return StepResult(torch.as_tensor(norm, dtype=torch.float64, device=self._engine.device).detach(), skipped)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's own names; in stage 3 parameters are empty but while they are in use."""
        return iter(self._named)

    def parameter_count(self) -> int:
        """Also while stage 3 has them divided."""
        return sum(getattr(p, "ds_numel", p.numel()) for _, p in self._named)

    def kept(self) -> KeptTensors:
        """Flat tensors; gradients as the engine holds them until the step."""
        weights = [getattr(p, "ds_tensor", p.data) for _, p in self._named]
        buffers = [b for _, b in self._engine.module.named_buffers()]
        return KeptTensors(weights, self._flats.gradients(), self._flats.kept(), buffers)

    def kept_by_parameter(self) -> dict[str, KeptTensors]:
        """Parameters as forward sees them; the rest is flat."""
        return {name: KeptTensors([getattr(p, "ds_tensor", p.data)], [], []) for name, p in self._named}

    def fill(self, give: Give) -> None:
        """Give the master weights their values, and forward what it sees of them; frozen ones have no other. Collective."""
        flats = self._flats
        fill_frozen(self._frozen, give)
        for group, fragments in enumerate(flats.fragments):
            with flats.opened(group, written=True) as (flat, _):
                flat.data.zero_()  # what pads the last rank's part
                for fragment in fragments:
                    whole = torch.empty(flats.shapes[fragment.name], dtype=flats.dtype(), device=flats.device)
                    give({fragment.name: whole})
                    fragment.within(flat.data).copy_(fragment.of(whole))
        flats.publish()

    def weights(self) -> dict[str, Tensor | Kept]:
        """The master weights, put together one after another; nothing of frozen ones, which training does not change."""
        return {name: _Fragmented(self._flats, name, None) for name in self._flats.shapes}

    def placements(self) -> dict[str, Tensor]:
        """Whole tensors on the host, of which pieces are taken; no storage."""
        return {name: torch.empty(()).expand(shape) for name, shape in self._flats.shapes.items()}

    def optimizer_tensors(self) -> dict[str, Tensor | Kept]:
        """State shaped like the parameters is put together when it is written; single numbers are each parameter's."""
        shaped, numbers = self._flats.state_keys()
        found: dict[str, Tensor | Kept] = {}
        for name in self._flats.shapes:
            found |= {f"{name}/{key}": torch.tensor(self._flats.number(key)) for key in numbers}
            found |= {f"{name}/{key}": _Fragmented(self._flats, name, key) for key in shaped}
        return found

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces of each tensor, one whole tensor at a time."""
        flats = self._flats
        keys = list(dict.fromkeys(path.rpartition("/")[2] for path in tensors))
        numbers = {key: value for key in keys if (value := self._number(tensors, key)) is not None}
        for group, fragments in enumerate(flats.fragments):
            with flats.opened(group, written=True) as (flat, state):
                state.update({key: self._as_state(value, flat) for key, value in numbers.items()})
                for key in (key for key in keys if key not in numbers):
                    dtype = next(tensors[path].dtype for path in tensors if path.endswith(f"/{key}"))  # not always the parameters'
                    state[key] = torch.zeros_like(flat, dtype=dtype, requires_grad=False)
                    for fragment in fragments:
                        if (path := f"{fragment.name}/{key}") in tensors:
                            fragment.within(state[key]).copy_(fragment.of(tensors[path]))
        flats.publish()
        if "step" in numbers and _is_deepspeeds(self._engine.basic_optimizer):
            _replay(self._engine.basic_optimizer, int(numbers["step"]))

    def _number(self, tensors: Mapping[str, Tensor], key: str) -> float | None:
        """The value of a state that is a single number; None where it is shaped like the parameters."""
        name, shape = next((n, s) for n, s in self._flats.shapes.items() if f"{n}/{key}" in tensors)
        tensor = tensors[f"{name}/{key}"]
        return float(tensor) if tensor.shape != shape and tensor.numel() == 1 else None

    def _as_state(self, value: float, flat: Tensor) -> Any:
        """As the optimizer keeps it itself: torch a tensor, DeepSpeed's own a number."""
        base = self._engine.basic_optimizer
        if _is_deepspeeds(base):
            return int(value)
        on_device = base.defaults.get("fused") or base.defaults.get("capturable")
        return torch.tensor(value, device=flat.device if on_device else "cpu")

    def scalars(self) -> dict[str, Any]:
        """The loss scale, where there is one."""
        if self._scaling is None:
            return {}
        scaler = self._engine.optimizer.loss_scaler
        return {"loss_scale": scaler.cur_scale, "good_steps": (scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Take the loss scale back."""
        if self._scaling is not None and "loss_scale" in scalars:
            scaler = self._engine.optimizer.loss_scaler
            scaler.cur_scale = scalars["loss_scale"]
            scaler.cur_iter, scaler.last_overflow_iter = scalars["good_steps"], -1

    def files(self) -> Mapping[str, str]:
        """DeepSpeed's configuration, as it was given."""
        return self._files

    def close(self) -> None:
        """Remove what is on the disk, and what was changed of torch."""
        own_engine.as_torch_multiplies()
        if self._nvme is not None:
            self._nvme.remove()


def _is_deepspeeds(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("deepspeed.")


def _replay(adam: Any, steps: int) -> None:
    """Bring DeepSpeed's AdamW to where its powers of the betas were: it multiplies them up step by step, beyond what its state tells, and a
    power taken anew differs in the last bit. A tensor of one element takes the steps."""
    group = adam.param_groups[0]
    tensors = [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        adam.ds_opt_adam.adam_update(adam.opt_id, step, 0.0, *group["betas"], group["eps"], 0.0, group["bias_correction"], *tensors)


class _Fragmented(Kept):
    """A parameter's master weight, or its optimizer state ``key``, of which each rank keeps a range."""

    def __init__(self, flats: Flats, name: str, key: str | None) -> None:
        self.shape, self.dtype = flats.shapes[name], flats.dtype(key)
        self._flats, self._name, self._key = flats, name, key

    def piece(self) -> Piece | None:
        """This rank's range of the flattened parameter."""
        if self._name not in self._flats.where:
            return None
        fragment = self._flats.where[self._name][1]
        return Piece(slice(fragment.start, fragment.start + fragment.size), lambda: self._flats.piece(self._name, self._key))
