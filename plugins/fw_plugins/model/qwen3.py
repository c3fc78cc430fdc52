"""Qwen3 of any shape."""

from __future__ import annotations

from fw_models.qwen3 import Qwen3, Qwen3Config
from fw_plugins.model.reference import ReferenceModel


class Qwen3Model(ReferenceModel):
    """Qwen3 architecture of any shape: queries and keys normalised per head."""

    api = 1
    hf_model_types = ("qwen3",)
    Config = Qwen3Config
    architecture = Qwen3
