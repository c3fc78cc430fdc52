"""Mistral of any shape."""

from __future__ import annotations

from fw_models.mistral import Mistral, MistralConfig
from fw_plugins.model.reference import ReferenceModel


class MistralModel(ReferenceModel):
    """Mistral architecture of any shape: Llama with a sliding window."""

    api = 1
    hf_model_types = ("mistral",)
    Config = MistralConfig
    architecture = Mistral
