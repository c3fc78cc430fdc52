"""The LightningModule: one Lightning batch is one optimizer step, all its micro-batches included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial

import pytorch_lightning as pl
from torch import Tensor

from fw.assemble import Assembly, assemble
from fw.kinds.checkpoint import Reader
from fw.kinds.data import Corpus, Rows
from fw.kinds.precision import PrecisionPolicy
from fw.meter.allocations import allocations
from fw.meter.earlier import Earlier
from fw.meter.leaks import LeakCheck
from fw.meter.memory import HostPeak, malloc_in_use_bytes, peak_memory_bytes
from fw.meter.operators import StepTrace
from fw.meter.step_clock import StepClock
from fw.meter.step_memory import StepMemory, StepMeter
from fw.meter.tracing import tracing
from fw.recipe import Recipe
from fw.training import run_dir
from fw.training.first_bad import FirstBad
from fw.training.forward_backward import Follower, forward_backward
from fw.training.host_allocator import give_back_freed_memory
from fw.training.loading import Batch
from fw.training.nonfinite import Nonfinite
from fw.training.rng import GeneratorStates, restore_rng
from fw.training.stop import StopRequest
from fw.training.strategy import MeshStrategy
from fw.training.trained import gradients_reach


@dataclass(frozen=True)
class StepOutcome:
    """A finished step. The tensors are on the device; reading them waits for it.

    Attributes:
        step: counted from 1.
        loss: this rank's part of the global mean loss; ranks that divide layers between them have the same part.
        tokens: of the input, over all ranks, without padding.
        flops: the model needs for them, forward and backward.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    skipped: bool
    tokens: int
    flops: float


class TrainingModule(pl.LightningModule):
    """Runs the recipe's objective over the assembled model; the sharding plugin's stepper owns what follows the loss."""

    def __init__(self, recipe: Recipe, corpus: Corpus, rows: Rows, vocab_size: int, checkpoint: Reader | None, stop: StopRequest) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.recipe = recipe
        self.corpus = corpus
        self.stop = stop
        self.start_step = checkpoint.state()["step"] if checkpoint else 0
        self.tokens_seen = checkpoint.state()["tokens"] if checkpoint else 0
        self.samples_seen = checkpoint.state()["loader"]["samples_seen"] if checkpoint else 0
        self.last: StepOutcome | None = None
        self.val_loss: float | None = None
        self.prepare: Callable[[], None] = lambda: None
        """Called on each rank before it assembles, while the others wait: what one rank of a host does for all."""
        self.before_update: Callable[[], None] = lambda: None
        """Called on each rank when a step is about to change weights and optimizer state."""
        self.memory: dict[int, StepMemory] = {}
        """By step, of those whose memory was measured, on this rank."""
        self.trace: StepTrace | None = None
        """Of the step that was traced, on this rank."""
        self.waited_seconds: Callable[[], float] = lambda: 0.0
        """For batches so far."""
        self.leaks = LeakCheck()
        """What these have left behind."""
        self.nonfinite: Nonfinite | None = None
        """What is asked where a step was not made."""
        self.host_peak = HostPeak()
        """Of this process."""
        self.before_bytes = 0
        """Of host memory in use when there was no model yet."""
        self.earlier: Earlier | None = None
        """What the process had before the run, which is not measured."""
        self._rows = rows
        self._vocab_size = vocab_size
        self._checkpoint = checkpoint
        self._assembly: Assembly | None = None
        self._clock: StepClock | None = None
        self._follower: Follower | None = None
        self._waited = 0.0
        self._has_looked = False
        self._val_sums: list[tuple[Tensor, int]] = []
        self._targets = 0
        self._precision = recipe.precision.policy()
        self._evaluation = ExitStack()

    @property
    def assembly(self) -> Assembly:
        """The model and its stepper, once configured."""
        assert self._assembly is not None, "configure_model comes first"
        return self._assembly

    @property
    def is_assembled(self) -> bool:
        """Whether there is a model."""
        return self._assembly is not None

    @property
    def strategy(self) -> MeshStrategy:
        """The run's strategy."""
        strategy = self.trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        return strategy

    def peak_memory_bytes(self) -> int:
        """The most so far, without what measuring takes: on a GPU of tensors, else of this process."""
        device = self.strategy.root_device
        return peak_memory_bytes(device) if device.type == "cuda" else self.host_peak.bytes()

    @property
    def clock(self) -> StepClock:
        """Of the steps that are neither measured nor traced."""
        if self._clock is None:
            # Who measures wants to know what is held, too.
            self._clock = StepClock(self.strategy.root_device, watches=self.recipe.memory.measure_step > 0)
        return self._clock

    def configure_model(self) -> None:
        """Assemble, where the mesh exists."""
        if self._assembly is None:
            device = self.strategy.root_device
            self.before_bytes = malloc_in_use_bytes() or 0
            self.prepare()
            self.strategy.barrier()
            self._assembly = assemble(self.recipe, self._vocab_size, self.strategy.mesh, device, self._checkpoint, self._rows)
            if self.global_rank == 0:
                run_dir.write(self.recipe.run_dir, self._assembly.stepper.files())
            self.model = self._assembly.stepper.module  # Lightning switches it between training and evaluation
            if self._checkpoint is not None:
                self._assembly.stepper.load_scalars(self._checkpoint.state()["scalars"])
                restore_rng(self._checkpoint.rng(self.global_rank), device)
                self._checkpoint = None

    def close(self) -> None:
        """The run is over, or has failed."""
        self.leave_evaluation()
        if self._assembly is not None:
            self._assembly.stepper.close()

    def configure_optimizers(self) -> None:
        """None: the stepper has its own."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Take this rank's part and count its targets while the batch is on the host, so that no step waits for the device."""
        micro_batches = [self.recipe.sharding.local_batch(micro, self.strategy.mesh) for micro in batch.micro_batches]
        self._targets = sum(self.recipe.objective.count(micro) for micro in micro_batches)
        return batch._replace(micro_batches=micro_batches)

    def on_fit_start(self) -> None:
        """Let Lightning count from where the checkpoint stands, so that its limits and intervals are in absolute steps."""
        epoch = self.trainer.fit_loop.epoch_loop
        for progress in (epoch.batch_progress.total, epoch.manual_optimization.optim_step_progress.total):
            for counter in ("ready", "started", "processed", "completed"):
                if hasattr(progress, counter):
                    setattr(progress, counter, self.start_step)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """Forward and backward of each micro-batch, then one step; measured or traced where that was asked for."""
        step = self.trainer.global_step + 1
        if self.recipe.memory.measures(step):
            with self.host_peak.metering():
                self._measured_step(batch, step)
                give_back_freed_memory()
        elif step == self.recipe.memory.trace_step:
            with self.host_peak.metering():
                self._traced_step(batch)
                give_back_freed_memory()
        else:
            waited = self.waited_seconds()
            self.clock.begin(waited - self._waited)
            self._follower = self.clock
            self._step(batch)
            self.clock.end()
            self.host_peak.stepped()
        self._waited = self.waited_seconds()

    def _traced_step(self, batch: Batch) -> None:
        self._follower = None
        with tracing(self.strategy.root_device, self.recipe.run_dir / run_dir.TRACE, self.global_rank) as traced:
            self._step(batch)
        self.trace = traced[0]

    def _measured_step(self, batch: Batch, step: int) -> None:
        self.last = None  # what the step frees must not be from before it, which its recording would not know
        recording = partial(allocations, lines=self.leaks.suspects, earlier=self.earlier)
        made, device = self.assembly, self.strategy.root_device
        self._follower = meter = StepMeter(made.stepper, made.model.blocks, device, recording, made.beside_weights)
        inputs = [tensor for micro in batch.micro_batches for tensor in micro.values()]
        with meter.step(inputs) as measured:
            self._step(batch)
        self.leaks.after(meter.left, self.assembly.stepper.kept())
        self.memory[step], self._follower = measured[0], None

    def _step(self, batch: Batch) -> None:
        recipe, stepper = self.recipe, self.assembly.stepper
        micro_batches = batch.micro_batches
        count, *asked = self.strategy.sum_on_host([float(self._targets), *self.stop.votes()])
        self.stop.decide(asked)
        step = self.trainer.global_step
        divisor = max(count / recipe.copies, 1.0)
        generators = GeneratorStates(self.strategy.root_device)
        lr_factor = recipe.schedule.factor(step, recipe.train.max_steps)
        self._change_precision(recipe.precision.policy_at(step))
        stepper.begin_step(lr_factor)
        if recipe.steps_in_backward:
            self.before_update()
        with self._looking():
            loss = self._compute(micro_batches, divisor, None)
        if not recipe.steps_in_backward:
            self.before_update()
        result = stepper.step(lr_factor)
        if self.nonfinite is not None and recipe.precision.policy().loss_scaling is None:  # which has a policy of its own
            if result.skipped:
                compute = partial(self._compute, micro_batches, divisor)
                again = self.nonfinite.met(self, step + 1, generators, compute, lr_factor)
                loss, result = again.loss, again.result
            elif recipe.steps_in_backward and not result.grad_norm.isfinite():
                self.nonfinite.spoilt(self, step + 1, loss)
            else:
                self.nonfinite.was_finite()
        # Lightning counts optimizer steps itself only through its own optimizer wrapper.
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.increment_ready()
        progress.increment_completed()
        tokens = int(batch.lengths.sum())
        self.tokens_seen += tokens
        self.samples_seen += recipe.train.global_batch_size
        flops = self.assembly.flops.for_sequences(batch.lengths)
        self.last = StepOutcome(step + 1, loss, result.grad_norm, stepper.lr * lr_factor, result.skipped, tokens, flops)
        if self.stop.decided:
            self.trainer.should_stop = True
            self.trainer.limit_val_batches = 0  # who asked to stop does not want to wait for a validation

    def _looking(self) -> AbstractContextManager[None]:
        """In the first step, whether adapters train."""
        adapters, first = self.assembly.model.adapters, not self._has_looked
        self._has_looked = True
        return gradients_reach(adapters, self.assembly.stepper) if adapters is not None and first else nullcontext()

    def _change_precision(self, policy: PrecisionPolicy) -> None:
        """Where another phase begins, all who compute are told."""
        if policy != self._precision:
            self._precision = policy
            self.assembly.stepper.change_precision(policy)
            self.recipe.activation.change_precision()

    def _compute(self, micro_batches: Sequence[dict[str, Tensor]], divisor: float, watch: FirstBad | None) -> Tensor:
        return forward_backward(self.recipe.objective, self.assembly.stepper, micro_batches, divisor, self._follower, watch)

    def leave_evaluation(self) -> None:
        """Weights as they were before validation, also where it has failed."""
        self._evaluation.close()

    def on_validation_epoch_start(self) -> None:
        """Begin a new sum; weights as validation sees them, once they have been copied where a checkpoint is still to be written."""
        self._val_sums = []
        self.before_update()
        self._evaluation.enter_context(self.assembly.stepper.evaluation())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """The objective's sum and count; no graph."""
        stepper = self.assembly.stepper
        (micro,) = batch.micro_batches
        with stepper.forward_context():
            loss = self.recipe.objective.loss_sum(stepper.module, micro)
        self._val_sums.append((loss, self._targets))

    def on_validation_epoch_end(self) -> None:
        """Weights as they were; the mean over all tokens of all ranks."""
        self.leave_evaluation()
        local = [
            float(sum(loss.double() for loss, _ in self._val_sums)),
            float(sum(count for _, count in self._val_sums)),
        ]
        total, count = self.strategy.sum_on_host(local)
        self.val_loss = total / count if count else None
        self._val_sums = []
