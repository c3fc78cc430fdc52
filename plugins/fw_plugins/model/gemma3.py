"""Gemma 3 of any shape."""

from __future__ import annotations

from fw_models.gemma3 import Gemma3, Gemma3Config
from fw_plugins.model.reference import ReferenceModel


class Gemma3Model(ReferenceModel):
    """Gemma 3 text architecture of any shape: five windows to each full attention, two rotary bases."""

    api = 1
    hf_model_types = ("gemma3_text",)
    Config = Gemma3Config
    architecture = Gemma3
