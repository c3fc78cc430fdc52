"""Qwen2 of any shape."""

from __future__ import annotations

from fw_models.qwen2 import Qwen2, Qwen2Config
from fw_plugins.model.reference import ReferenceModel


class Qwen2Model(ReferenceModel):
    """Qwen2 and 2.5 architecture of any shape: Llama with biases on queries, keys and values."""

    api = 1
    hf_model_types = ("qwen2",)
    Config = Qwen2Config
    architecture = Qwen2
