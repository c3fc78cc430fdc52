"""What follows a step whose loss or gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fw.assemble import undivided, values
from fw.averaging import AveragedWeights
from fw.errors import RunError
from fw.kinds.checkpoint import Ranks, Reader
from fw.kinds.sharding import StepResult
from fw.recipe import Recipe
from fw.training import resume
from fw.training.first_bad import FirstBad
from fw.training.rng import GeneratorStates

if TYPE_CHECKING:
    from fw.training.module import TrainingModule
    from fw.training.saving import Saver

Compute = Callable[[FirstBad | None], Tensor]
"""Forward and backward of all micro-batches, watched or not; this rank's part of the loss."""


@dataclass(frozen=True)
class Again:
    """A step that was computed a second time."""

    loss: Tensor
    result: StepResult


class Nonfinite:
    """The policy ``train.on_nonfinite``. All methods are collective.

    Args:
        say: prints a line, on the first rank.
        start: the checkpoint the run has begun from, if any.
        older: identities of checkpoints that were there before it, of which others than ``start`` are another future's.
    """

    def __init__(
        self, recipe: Recipe, saver: Saver, ranks: Ranks, say: Callable[[str], None], start: Reader | None, older: Set[str]
    ) -> None:
        self._recipe, self._saver, self._ranks, self._say = recipe, saver, ranks, say
        self._start, self._older = start, older
        self._in_a_row = 0

    def was_finite(self) -> None:
        """A step was made."""
        self._in_a_row = 0

    def met(self, module: TrainingModule, step: int, before: GeneratorStates, compute: Compute, lr_factor: float) -> Again:
        """A step was not: compute it again to see where that comes from, and do what the policy says.

        Weights and generators are as they were, so it goes wrong again, unless the device was at fault.

        Raises:
            RunError: the run is to end.
        """
        before.restore()
        watched = FirstBad(module.assembly.stepper.module)
        try:
            with torch.compiler.set_stance("force_eager"):
                loss = compute(watched)
        finally:
            watched.rest()
        again = Again(loss, module.assembly.stepper.step(lr_factor))
        found = module.strategy.gather((float(loss), watched.found))
        first, rank = min(((finding, rank) for rank, (_, finding) in enumerate(found) if finding), default=(None, 0))
        total = sum(part for part, _ in found) / self._recipe.copies
        if not again.result.skipped:
            self._say(f"warning: step {step}: the gradient was not finite, computed again it was: a fault of memory or device?")
            return again
        what = f"step {step}: loss {total:.4g}, gradient norm {float(again.result.grad_norm):.4g}"
        on_rank = f" on rank {rank}" if module.strategy.world_size > 1 else ""
        what += f"; {first[2]}{on_rank}" if first is not None else "; what modules give and take is finite, sums over it are not"
        self._in_a_row += 1
        policy = self._recipe.train.on_nonfinite
        if policy == "stop":
            raise RunError(f"{what}. The step was not made; resume with a lower optimizer.lr, or with train.on_nonfinite=skip or roll_back")
        if self._in_a_row >= self._recipe.train.nonfinite_limit:
            raise RunError(f"{what}. So were {self._in_a_row} steps in a row, the most that train.nonfinite_limit allows")
        if policy == "skip":
            self._say(f"{what}; step skipped")
        else:
            self._say(f"{what}; going on from {self._roll_back(module, what)}")
        return again

    def spoilt(self, module: TrainingModule, step: int, loss: Tensor) -> None:
        """Weights were updated in backward, before anything could be known of all gradients.

        Raises:
            RunError: the run is to end.
        """
        total = sum(module.strategy.gather(float(loss))) / self._recipe.copies
        what = f"step {step}: loss {total:.4g}, gradient not finite; weights were updated by it (optimizer.in_backward)"
        self._in_a_row += 1
        if self._recipe.train.on_nonfinite != "roll_back":
            raise RunError(f"{what}. Go on from the last checkpoint with resume=auto, and see where it comes from with in_backward=false")
        if self._in_a_row >= self._recipe.train.nonfinite_limit:
            raise RunError(f"{what}. So were {self._in_a_row} steps in a row, the most that train.nonfinite_limit allows")
        self._say(f"{what}; going on from {self._roll_back(module, what)}")

    def _roll_back(self, module: TrainingModule, what: str) -> str:
        """Weights and optimizer state of the newest checkpoint; the data goes on, or it would end here again."""
        self._saver.settle()
        reader = resume.newest(self._recipe, self._ranks, self._say, self._older) or self._start
        if reader is None:
            raise RunError(f"{what}. There is no checkpoint yet to roll back to (train.save_every={self._recipe.train.save_every})")
        recipe, stepper = self._recipe, module.assembly.stepper
        whole = undivided(recipe, module.assembly.vocab_size)  # the model's own parameters may be empty now, as those of ZeRO's stage 3
        with torch.no_grad():
            stepper.fill(values(whole, recipe.train.seed, reader, recipe.model.weights))
            stepper.load_optimizer_tensors(reader.optimizer(stepper.placements()))
            if isinstance(stepper, AveragedWeights):
                stepper.begin_average(reader.average(whole))
        stepper.load_scalars(reader.state()["scalars"])
        return str(reader.place)
