"""A model of transformers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from fw.api import AttentionPlugin, CausalLM, ModelPlugin, UserError, did_you_mean, find, read_config
from fw_models.hf_config import NO_EFFECT


@dataclass
class HFConfig:
    """Which directory."""

    path: str = ""
    """Model directory (config.json and safetensors), run directory of fw's own, or `org/name` of the hub."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json to replace, like `{attention_dropout: 0.1}`."""

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("model.path: give a model directory")


class HFModel(ModelPlugin):
    """Any causal language model of transformers, run by its own code; for architectures that no other plugin reads."""

    api = 1
    Config = HFConfig
    config: HFConfig
    packages: ClassVar[dict[str, str]] = {"transformers": "transformers>=5"}

    def __init__(self, config: HFConfig) -> None:
        super().__init__(config)
        self._directory = find(config.path)
        self._hf_config = _read(self._directory, config.fields)

    @property
    def weights(self) -> Path | None:
        """The directory: such a model has no other beginning."""
        return self._directory

    @property
    def vocab_size(self) -> int | None:
        """As config.json says."""
        size: int = self._hf_config.get_text_config().vocab_size
        return size

    def build(self, vocab_size: int, sequence_length: int, attention: AttentionPlugin) -> CausalLM:
        """The model on the meta device."""
        from transformers import AutoModelForCausalLM

        from fw_models.hf_wrapper import HFCausalLM

        name = attention.hf_name
        if not name:
            raise UserError(f"model hf: transformers has no equal of {type(attention).__name__}; use attention: sdpa or eager")

        def make(dtype: torch.dtype) -> Any:
            return AutoModelForCausalLM.from_config(copy.deepcopy(self._hf_config), attn_implementation=name, dtype=dtype)

        try:
            return HFCausalLM(make)
        except (ValueError, ImportError) as error:
            raise UserError(f"model hf: transformers builds no such model with attention '{name}': {_first_line(error)}") from error


def _read(directory: Path, changes: dict[str, Any]) -> Any:
    """transformers' configuration; every change must be one it has a field for."""
    from transformers import AutoConfig

    try:
        as_it_is = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        changed = type(as_it_is).from_dict({**read_config(directory), **changes}) if changes else as_it_is
    except Exception as error:  # transformers raises what it likes; the sentence must name the file
        raise UserError(f"model.path: transformers does not read {directory}/config.json: {_first_line(error)}") from error
    known = {*as_it_is.to_dict(), *getattr(as_it_is, "attribute_map", {})}
    if unknown := sorted(set(changes) - known):
        raise UserError(f"model.fields: {type(as_it_is).__name__} has no field {', '.join(unknown)}{did_you_mean(unknown[0], known)}")
    if idle := sorted(set(changes) & NO_EFFECT):
        raise UserError(f"model.fields: {', '.join(idle)} changes nothing that a model computes; leave it out")
    return changed


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]
