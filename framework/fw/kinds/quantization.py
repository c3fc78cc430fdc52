"""The contract of ``quantization``: which weights are kept in fewer bits than they are computed with."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch

from fw.kinds.model import CausalLM, Quantized
from fw.registry import Plugin


class QuantizationPlugin(Plugin):
    """Decides which layers keep codes. A layer that does is an :class:`torch.nn.Linear` still, of the same features and names: ``weight``
    are the codes, and ``dense_weight(dtype)`` gives what they stand for."""

    kind: ClassVar[str] = "quantization"

    @abstractmethod
    def apply(self, model: CausalLM, compute: torch.dtype) -> Mapping[str, Quantized]:
        """Have layers keep codes. Called under ``torch.device("meta")``, on every rank alike, before anything else changes the model.

        Codes and scales are frozen parameters of integer dtypes (a scale as its bits), so that nothing casts them; they may be divided
        between ranks anywhere, and are whole again where a layer computes.

        Args:
            compute: dtype of the products; what is quantized has it.

        Returns:
            the weights that are kept so, by the model's names.

        Raises:
            UserError: the options do not fit the model; what would.
        """
