"""The contract of ``sharding``: how ranks divide the model, and who owns the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fw.kinds.attention import AttentionPlugin
from fw.kinds.checkpoint import Kept
from fw.kinds.model import CausalLM, Give
from fw.kinds.offload import OffloadPolicy
from fw.kinds.optimizer import OptimizerSpec
from fw.kinds.precision import PrecisionPolicy
from fw.registry import Plugin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICATE, SHARD, CONTEXT, TENSOR = "replicate", "shard", "context", "tensor"
"""Dimensions of a device mesh, in this order. Ranks that differ in the first two see different samples; along ``context`` they see
different positions of the same samples, along ``tensor`` the same."""


@dataclass(frozen=True)
class StepSpec:
    """What a step is to honour; data only, the same on every rank.

    Attributes:
        clip_norm: largest global L2 norm of the gradient; 0 means no clipping.
        micro_batch_size: sequences per forward; None where their length decides.
        accumulation: forwards and backwards per step; None where it varies from step to step, the same on every rank.
        ranks_per_host: ranks that share a host's memory and disks.
        device_type: what the model computes on, ``cpu`` or ``cuda``.
        lengths_vary: micro-batches have rows of different length.
        segments: batches have ``segments``: rows hold several documents, or padding.
        phases: what ``precision`` will be one after another, the first included.
        is_here: it will run on this machine, whose disks are those of ``offload.path``; False for a plan or a job for others.
        averages: weights are averaged besides, of each parameter the part that its rank keeps, by who gives them to the stepper.
    """

    precision: PrecisionPolicy
    offload: OffloadPolicy
    optimizer: OptimizerSpec
    clip_norm: float = 0.0
    micro_batch_size: int | None = 1
    accumulation: int | None = 1
    ranks_per_host: int = 1
    device_type: str = "cpu"
    lengths_vary: bool = False
    segments: bool = False
    phases: tuple[PrecisionPolicy, ...] = ()
    averages: bool = False
    is_here: bool = True

    @property
    def computes_in(self) -> frozenset[torch.dtype]:
        """The compute dtypes of all phases."""
        return frozenset(policy.compute for policy in (self.precision, *self.phases))


@dataclass(frozen=True)
class StepResult:
    """``grad_norm``: global L2 norm before clipping, a scalar on the device. ``skipped``: it is not finite, and the update was not made (an
    update in backward cannot be skipped)."""

    grad_norm: Tensor
    skipped: bool = False


@dataclass(frozen=True)
class KeptTensors:
    """Plain tensors that are there between two steps (``gradients``: two micro-batches), this rank's parts, on whatever device."""

    weights: list[Tensor]
    gradients: list[Tensor]
    optimizer: list[Tensor]
    buffers: list[Tensor] = field(default_factory=list)


class Stepper(ABC):
    """Backward, clip, step and optimizer state: everything between a loss and new weights. One per run; used on all ranks alike."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """What to call for forward: the model, wrapped where sharding wraps it."""

    def forward_context(self) -> AbstractContextManager[object]:
        """Enter around every forward, in training, validation and sampling: autocast, or nothing."""
        return nullcontext()

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Enter around forward and backward of one micro-batch; ``last`` says whether a step follows."""
        return nullcontext()

    def whole_sequences(self) -> AbstractContextManager[object]:
        """Enter around a forward on sequences that :meth:`ShardingPlugin.local_batch` has not divided, in evaluation."""
        return nullcontext()

    length_multiple: int = 1
    """What the length of a sequence must be a multiple of."""

    def evaluation(self) -> AbstractContextManager[object]:
        """Enter around a validation or a sampling as a whole, between two steps: weights in the compute dtype, where the policy wants
        ``full_eval`` and forward does not see them so anyway. Left by an exception too, weights are what they were, to the bit."""
        return nullcontext()

    def change_precision(self, policy: PrecisionPolicy) -> None:  # noqa: B027
        """Called between two steps where another of ``StepSpec.phases`` begins. Collective."""

    def begin_step(self, lr_factor: float) -> None:  # noqa: B027
        """Called before the first forward of a step; ``lr_factor`` is what :meth:`step` will get."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of ``loss``, this rank's part of the global loss: the parts of all ranks and micro-batches add up."""
        loss.backward()

    @abstractmethod
    def step(self, lr_factor: float) -> StepResult:
        """Clip, update the weights with the learning rate times ``lr_factor``, and drop the gradients. Collective.

        Where the norm of the gradient is not finite, weights and optimizer state stay as they are, on all ranks alike.
        """

    @property
    @abstractmethod
    def lr(self) -> float:
        """The learning rate before the schedule's factor."""

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the model's own names, no wrapper prefix; DTensors where they are sharded."""

    def parameter_count(self) -> int:
        """How many numbers the model's parameters are, over all ranks."""
        return sum(parameter.numel() for _, parameter in self.parameters())

    def kept(self) -> KeptTensors:
        """What this rank keeps, for the account of its memory; master weights of another dtype are in the optimizer's state. Here: of plain
        tensors, each whole."""
        weights = [parameter for _, parameter in self.parameters()]
        state = [value for value in self.optimizer_tensors().values() if isinstance(value, Tensor)]
        gradients = [parameter.grad for parameter in weights if parameter.grad is not None]
        return KeptTensors([*weights], gradients, state, list(self.module.buffers()))

    def kept_by_parameter(self) -> dict[str, KeptTensors]:
        """What of :meth:`kept` is a parameter's own, by the model's own names; nothing of what an engine keeps for several together."""
        return {}

    @abstractmethod
    def fill(self, give: Give) -> None:
        """Take other values for the parameters. Collective."""

    def weights(self) -> dict[str, Tensor | Kept]:
        """What a checkpoint holds of the parameters, by the model's own names, in the dtype they are kept in."""
        return {name: parameter.detach() for name, parameter in self.parameters()}

    def placements(self) -> dict[str, Tensor]:
        """For each parameter a tensor of its shape, placed like the optimizer state that :meth:`load_optimizer_tensors` wants; and one for
        each ``<parameter>/<key>`` that has another shape and is divided too."""
        return dict(self.parameters())

    @abstractmethod
    def optimizer_tensors(self) -> dict[str, Tensor] | dict[str, Tensor | Kept]:
        """Optimizer state as ``<parameter>/<key>``: shaped and placed like the parameter, or the same on every rank."""

    @abstractmethod
    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what :meth:`optimizer_tensors` gave, placed like :meth:`placements`; a tensor is read when it is looked up."""

    def scalars(self) -> dict[str, Any]:
        """What else a resume needs (the loss scale), as JSON."""
        return {}

    def load_scalars(self, scalars: dict[str, Any]) -> None:  # noqa: B027
        """Take back what :meth:`scalars` gave."""

    def files(self) -> Mapping[str, str]:
        """Name → text of what the run directory should hold besides: an engine's own configuration."""
        return {}

    def close(self) -> None:  # noqa: B027
        """The run is over, or has failed: give back what outlives a process (files on a disk)."""


class ShardingPlugin(Plugin):
    """Decides how ranks divide the model."""

    kind: ClassVar[str] = "sharding"
    moves_parameters: ClassVar[bool] = True
    """Whether it brings parameters from where ``offload.params`` says; else each rank has them whole, and frozen ones may lie elsewhere."""

    @abstractmethod
    def mesh_shape(self, world_size: int) -> dict[str, int]:
        """Sizes of the device mesh by dimension name, in order; their product is ``world_size``. Empty for one rank without a mesh.

        Raises:
            UserError: no mesh fits, with the sizes that do.
        """

    def length_multiple(self, mesh_shape: Mapping[str, int]) -> int:
        """What the length of the rows of every batch must be a multiple of."""
        return 1

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """Refuse what cannot work, before any rank starts. ``model`` is on the meta device.

        Raises:
            UserError: the model does not divide so, or the step cannot be honoured; with what would work.
        """

    def share(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, rank: int) -> tuple[int, ...]:
        """What tells a rank from others where that does not show in the shapes of its DTensors, as an engine's own parts do not: ranks of
        equal numbers take the same. Of many ranks a plan runs some, and goes by the order of the numbers: larger ones keep more.

        Args:
            model: as :meth:`shard` has left it.
        """
        return ()

    def traced(self, spec: StepSpec) -> AbstractContextManager[object]:
        """Entered around :meth:`start` and the steps of a plan, which run without bytes: tensors are fake, the process group has nobody
        else in it, collectives leave what they are given as it was, and values that are asked for are 1, or 0 where that is known.

        An engine that cannot go on with that (it reads what another rank has sent, or calls a library of its own by address) is helped
        here, and only here: whatever it allocates in training it must allocate in here too. Left, all is as it was.

        Raises:
            UserError: a step that is specified so cannot be run without bytes; why.
        """
        return nullcontext()

    def prepare(self, spec: StepSpec, say: Callable[[str], None]) -> None:
        """Build what the step needs on this host (compiled operators). Called before its ranks start, or by each of them at the same time
        where another launcher has started them.

        Raises:
            UserError: the host lacks what the build needs.
            RunError: the build failed.
        """

    def attention(self, attention: AttentionPlugin, mesh: DeviceMesh | None) -> AttentionPlugin:
        """What the model computes attention with, where ranks divide sequences between them."""
        return attention

    def local_batch(self, batch: dict[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
        """This rank's part of a batch ``[B, L]`` that all ranks of its replica have read; on the host."""
        return batch

    def parallelize(self, model: CausalLM, mesh: DeviceMesh | None) -> None:
        """Divide the computation of single layers between ranks, by the model's names, before anything wraps them; on the meta device."""

    @abstractmethod
    def shard(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> None:
        """Divide the parameters in place, on the meta device, before any has bytes. Called on every rank."""

    @abstractmethod
    def stepper(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec) -> Stepper:
        """The owner of the step, once the parameters have their values."""

    def start(self, model: CausalLM, mesh: DeviceMesh | None, spec: StepSpec, device: torch.device, give: Give) -> Stepper:
        """Leave the meta device: give the model storage and values, and its step an owner. Collective.

        A plugin whose engine must exist before the values do overrides this one.
        """
        model.materialise(device)
        give(model.stored())
        return self.stepper(model, mesh, spec)
