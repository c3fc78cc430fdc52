"""Mixtral of any shape."""

from __future__ import annotations

from fw_models.mixtral import Mixtral, MixtralConfig
from fw_plugins.model.reference import ReferenceModel


class MixtralModel(ReferenceModel):
    """Mixtral architecture of any shape: Mistral with a mixture of experts."""

    api = 1
    hf_model_types = ("mixtral",)
    Config = MixtralConfig
    architecture = Mixtral
