"""The contract of ``objective``: what is minimised, as a sum and a count, so that ranks and micro-batches of unequal size weigh right."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from fw.registry import Plugin


class ObjectivePlugin(Plugin):
    """The loss of a step is Σ :meth:`loss_sum` ÷ Σ :meth:`count`, both over all micro-batches of all ranks."""

    kind: ClassVar[str] = "objective"

    @abstractmethod
    def count(self, batch: Mapping[str, Tensor]) -> int:
        """What the loss is averaged over, usually target tokens. Called on the host for every micro-batch of a step, before forward."""

    @abstractmethod
    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Forward and the loss summed over the batch: a scalar in fp32 with a graph. ``model`` may be wrapped: call it only.

        It takes the batch's ``input_ids``, and ``positions`` and ``segments`` where there are any, as :class:`fw.kinds.model.CausalLM`
        does. Logits may be divided between ranks along the vocabulary: then ``cross_entropy`` is computed so, and other operations as
        DTensors do.
        """
