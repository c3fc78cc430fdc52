"""Llama of any shape."""

from __future__ import annotations

from fw_models.llama import Llama, LlamaConfig
from fw_plugins.model.reference import ReferenceModel


class LlamaModel(ReferenceModel):
    """Llama 2/3 architecture of any shape: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    api = 1
    hf_model_types = ("llama",)
    Config = LlamaConfig
    architecture = Llama
