"""A model directory, whatever its architecture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fw.api import AttentionPlugin, CausalLM, ModelPlugin, UserError, find, plugin_for, read_config


@dataclass
class AutoConfig:
    """Which directory, and what of it."""

    path: str = ""
    """Model directory (config.json and safetensors), run directory of fw's own, or `org/name` of the hub."""
    pretrained: bool = True
    """Begin from its weights; off: only its shape, with initial weights."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of config.json to replace, like `{attention_dropout: 0.1}`."""

    def __post_init__(self) -> None:
        if not self.path:
            raise UserError("model.path: give a model directory")


class AutoModel(ModelPlugin):
    """Any model directory of an architecture that a plugin reads: picked by config.json, begun from its weights."""

    api = 1
    Config = AutoConfig
    config: AutoConfig

    def __init__(self, config: AutoConfig) -> None:
        super().__init__(config)
        self._directory = find(config.path)
        self._plugin = plugin_for(self._directory, read_config(self._directory), config.fields)

    @property
    def weights(self) -> Path | None:
        """The directory, if training is to begin from it."""
        return self._directory if self.config.pretrained else None

    @property
    def vocab_size(self) -> int | None:
        """As config.json says."""
        return self._plugin.vocab_size

    def build(self, vocab_size: int, sequence_length: int, attention: AttentionPlugin) -> CausalLM:
        """The model on the current device."""
        return self._plugin.build(vocab_size, sequence_length, attention)
