"""Gemma 2 of any shape."""

from __future__ import annotations

from fw_models.gemma2 import Gemma2, Gemma2Config
from fw_plugins.model.reference import ReferenceModel


class Gemma2Model(ReferenceModel):
    """Gemma 2 architecture of any shape: GeGLU, norms on both sides, capped scores, windows in turns."""

    api = 1
    hf_model_types = ("gemma2",)
    Config = Gemma2Config
    architecture = Gemma2
