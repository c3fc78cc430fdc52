"""Weights as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fw.api import CausalLM, QuantizationPlugin, Quantized


class Nothing(QuantizationPlugin):
    """No weight is kept in fewer bits."""

    api = 1

    def apply(self, model: CausalLM, compute: torch.dtype) -> Mapping[str, Quantized]:
        """Nothing changes."""
        return {}
