"""Qwen3 with experts, of any shape."""

from __future__ import annotations

from fw_models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig
from fw_plugins.model.reference import ReferenceModel


class Qwen3MoEModel(ReferenceModel):
    """Qwen3 mixture-of-experts architecture of any shape."""

    api = 1
    hf_model_types = ("qwen3_moe",)
    Config = Qwen3MoEConfig
    architecture = Qwen3MoE
