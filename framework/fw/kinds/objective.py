"""The contract of ``objective``: what is minimised, as a sum and a count, so that ranks and micro-batches of unequal size weigh right."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fw.kinds.data import Corpus
from fw.kinds.model import CausalLM
from fw.registry import Plugin


@dataclass(frozen=True)
class Beside:
    """A frozen model that a loss computes with, beside the one that trains.

    Attributes:
        path: its directory, a run, or ``org/name`` of the hub.
        quantization: a plugin for its weights, by name.
        option: that says so, for who is told what is wrong.
        in_files: whether its matrices stay in its files, mapped.
    """

    path: str
    quantization: str
    option: str
    in_files: bool = False


class ObjectivePlugin(Plugin):
    """The loss of a step is Σ :meth:`loss_sum` ÷ Σ :meth:`count`, both over all micro-batches of all ranks."""

    kind: ClassVar[str] = "objective"

    is_likelihood: ClassVar[bool] = True
    """Whether the loss is the mean of the labels' negative log-likelihoods, so that bits per byte follow from it."""

    figures: Sequence[str] = ()
    """Names of what it tells beside the loss, as means; :meth:`take_figures` has their sums."""

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int]) -> None:
        """Refuse what it cannot do, before any rank starts. ``model`` is on the meta device, adapters and codes in it.

        Raises:
            UserError: with what would work, the option that is at fault first.
        """

    def check_data(self, corpus: Corpus) -> None:
        """Refuse data that it cannot learn from, before any rank starts. It may read samples, and begins with the first.

        Raises:
            UserError: with what would work, the option that is at fault first.
        """

    @property
    def beside(self) -> Beside | None:
        """A model that it needs; on every rank, divided as sharding divides, in the dtype of compute."""
        return None

    @property
    def ahead(self) -> Beside | None:
        """A model that it needs before training, and not in it: whose answers :meth:`answer` keeps in files."""
        return None

    def answer(self, model: CausalLM, batches: Iterable[Mapping[str, Tensor]]) -> None:
        """Keep what training will want to know of that model for these batches, one after another; called where :attr:`ahead` is one.

        Args:
            model: in evaluation mode.
            batches: on the model's device, as :meth:`loss_sum` has them.
        """

    def use(self, model: CausalLM) -> None:
        """The model of :attr:`beside`, in evaluation mode, before the first step; called without a gradient."""

    def take_figures(self) -> tuple[list[float], int]:
        """Of this rank's training since the last call: sums of :attr:`figures`, and what they are to be divided by."""
        return [], 0

    @abstractmethod
    def count(self, batch: Mapping[str, Tensor]) -> int:
        """What the loss is averaged over, usually target tokens. Called on every rank for every micro-batch of a step, before forward; the
        tensors, ``[B, L]`` as :data:`fw.kinds.data.Sample` has them by rows, are on the host."""

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward and the loss summed over the batch: a scalar in fp32 with a graph. ``model`` may be wrapped: call it only.

        Called on every rank, in training and validation; the batch is on the model's device. The model takes the batch's ``input_ids``, and
        ``positions`` and ``segments`` where there are any, as :class:`fw.kinds.model.CausalLM` does. Logits may be divided between ranks
        along the vocabulary: then ``cross_entropy`` is computed so, and other operations as DTensors do.
        """
