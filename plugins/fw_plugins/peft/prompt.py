"""Prompt tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fw.api import CausalLM, PeftPlugin
from fw_plugins.peft.changed import refuse_unknown
from fw_plugins.peft.virtual import SAID_BY_THE_MODEL, VirtualTokens, VirtualTokensConfig

_BEGINNING = {"prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs", "random_init"}


@dataclass
class PromptConfig(VirtualTokensConfig):
    """How many virtual tokens, and how they begin."""

    tokens: int = 20
    """Virtual tokens before every sequence. Each is as wide as the model, and takes what a token takes in every step: activations grow by
    tokens / sequence length."""


class Prompt(VirtualTokens):
    """Prompt tuning: embeddings of virtual tokens before every sequence train (Lester et al. 2021, https://arxiv.org/abs/2104.08691)."""

    api = 1
    Config = PromptConfig
    config: PromptConfig
    peft_types: ClassVar[tuple[str, ...]] = ("PROMPT_TUNING",)
    peft_type = "PROMPT_TUNING"

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """As peft's ``PromptTuningConfig``."""
        refuse_unknown(raw, {"peft_type", "num_virtual_tokens"} | SAID_BY_THE_MODEL | _BEGINNING)
        return cls(PromptConfig(tokens=raw.get("num_virtual_tokens") or 0))

    def add(self, model: CausalLM) -> str:
        """Embeddings."""
        return model.add_prompt(self.config.tokens)

    def described(self, model: CausalLM) -> dict[str, Any]:
        """Their width, and how they began."""
        return {"token_dim": model.get_parameter("prompt_embeddings").shape[1], "prompt_tuning_init": "RANDOM"}
