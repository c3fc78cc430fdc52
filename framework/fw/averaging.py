"""An exponential moving average of the weights beside them: what Polyak and Juditsky (1992) take for the result of stochastic descent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fw.checkpointing.placement import local_part
from fw.kinds.checkpoint import Kept
from fw.kinds.model import Give
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import KeptTensors, Stepper, StepResult

_UPDATES = "ema_updates"


class AveragedWeights(Stepper):
    """Another stepper, that averages what its steps come to; validation and sampling see the average.

    After update n, of those that were made, ``w̄ ← d w̄ + (1 − d) w`` with ``d = min(decay, (1 + n) / (10 + n))``, so that what the weights
    began from is soon forgotten. Each rank averages the part of a parameter that it keeps, in fp32.

    Args:
        inner: has parameters of its own, in tensors or DTensors, that each rank keeps a part of.
        decay: what the average keeps of itself.
    """

    def __init__(self, inner: Stepper, decay: float) -> None:
        self.inner, self._decay, self._updates = inner, decay, 0
        self.length_multiple = inner.length_multiple
        trained = [(name, parameter) for name, parameter in inner.parameters() if parameter.requires_grad]
        self._weights: dict[str, nn.Parameter] = dict(trained)
        with torch.no_grad():
            # Of the parameter's class, so that whoever saves it sees how it is divided.
            self.average: dict[str, Tensor] = {name: parameter.detach().to(torch.float32, copy=True) for name, parameter in trained}

    def step(self, lr_factor: float) -> StepResult:
        """That of the other one; where it was made, the average follows."""
        result = self.inner.step(lr_factor)
        if not result.skipped:
            self._updates += 1
            self._follow(min(self._decay, (1 + self._updates) / (10 + self._updates)))
        return result

    @torch.no_grad()
    def _follow(self, decay: float) -> None:
        alike: tuple[list[Tensor], list[Tensor]] = ([], [])
        for average, weight in self._pairs():
            if weight.dtype == average.dtype:
                alike[0].append(average)
                alike[1].append(weight)
            else:
                average.lerp_(weight.to(average.dtype), 1 - decay)
        if alike[0]:
            torch._foreach_lerp_(*alike, 1 - decay)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        for name, average in self.average.items():
            yield local_part(average)[0], local_part(self._weights[name].detach())[0]

    def evaluation(self) -> AbstractContextManager[object]:
        """With the average for weights."""
        return self._with_average()

    @contextmanager
    def _with_average(self) -> Iterator[None]:
        before = self._exchange(None)
        try:
            with self.inner.evaluation():
                yield
        finally:
            self._exchange(before)

    @torch.no_grad()
    def _exchange(self, before: list[Tensor] | None) -> list[Tensor]:
        """Weights for the average, or back; of another dtype they are kept, of the same they wait in the average's place."""
        kept: list[Tensor] = []
        waiting = iter(before or ())
        for average, weight in self._pairs():
            if weight.dtype == average.dtype:
                moved = weight.clone()
                weight.copy_(average)
                average.copy_(moved)
            elif before is None:
                kept.append(weight.clone())
                weight.copy_(average)
            else:
                weight.copy_(next(waiting))
        return kept

    def begin_average(self, give: Give | None) -> None:
        """Values for the average by ``give``; None for those of the weights."""
        for average, weight in self._pairs():
            with torch.no_grad():
                average.copy_(weight)
        if give is not None:
            give(self.average)

    def kept(self) -> KeptTensors:
        """The average is the optimizer's."""
        kept = self.inner.kept()
        return replace(kept, optimizer=[*kept.optimizer, *(average for average, _ in self._pairs())])

    def kept_by_parameter(self) -> dict[str, KeptTensors]:
        """Likewise."""
        found = self.inner.kept_by_parameter()
        return {
            name: replace(kept, optimizer=[*kept.optimizer, local_part(self.average[name])[0]]) if name in self.average else kept
            for name, kept in found.items()
        }

    def scalars(self) -> dict[str, Any]:
        """With how many updates there were."""
        return {**self.inner.scalars(), _UPDATES: self._updates}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """0 updates where nobody has averaged before."""
        self._updates = scalars.get(_UPDATES, 0)
        self.inner.load_scalars({key: value for key, value in scalars.items() if key != _UPDATES})

    # What follows is the other one's.

    @property
    def module(self) -> nn.Module:
        return self.inner.module

    @property
    def lr(self) -> float:
        return self.inner.lr

    def forward_context(self) -> AbstractContextManager[object]:
        return self.inner.forward_context()

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        return self.inner.micro_batch(last)

    def whole_sequences(self) -> AbstractContextManager[object]:
        return self.inner.whole_sequences()

    def change_precision(self, policy: PrecisionPolicy) -> None:
        self.inner.change_precision(policy)

    def begin_step(self, lr_factor: float) -> None:
        self.inner.begin_step(lr_factor)

    def backward(self, loss: Tensor) -> None:
        self.inner.backward(loss)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.inner.parameters()

    def parameter_count(self) -> int:
        return self.inner.parameter_count()

    def fill(self, give: Give) -> None:
        self.inner.fill(give)

    def weights(self) -> dict[str, Tensor | Kept]:
        return self.inner.weights()

    def placements(self) -> dict[str, Tensor]:
        return self.inner.placements()

    def optimizer_tensors(self) -> dict[str, Tensor] | dict[str, Tensor | Kept]:
        return self.inner.optimizer_tensors()

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.inner.load_optimizer_tensors(tensors)

    def files(self) -> Mapping[str, str]:
        return self.inner.files()

    def close(self) -> None:
        self.inner.close()
