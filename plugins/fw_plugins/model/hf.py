"""A model of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from fw.errors import UserError
from fw.kinds.attention import AttentionPlugin
from fw.kinds.model import CausalLM, ModelPlugin
from fw.locate import find


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
        from transformers import AutoConfig

        self._directory = find(config.path)
        try:
            self._hf_config = AutoConfig.from_pretrained(self._directory, **config.fields)
        except Exception as error:  # transformers raises what it likes; the sentence must name the file
            first = (str(error).strip().splitlines() or [""])[0]
            raise UserError(f"model.path: transformers does not read {self._directory}/config.json: {first}") from error

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
        return HFCausalLM(lambda: AutoModelForCausalLM.from_config(self._hf_config, attn_implementation=name, dtype=torch.float32))
