"""Weights as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fw.kinds.model import CausalLM, Quantized
from fw.kinds.quantization import QuantizationPlugin


class Nothing(QuantizationPlugin):
    """No weight is kept in fewer bits."""

    api = 1

    def apply(self, model: CausalLM, compute: torch.dtype) -> Mapping[str, Quantized]:
        """Nothing changes."""
        return {}
