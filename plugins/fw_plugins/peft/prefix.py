"""Prefix tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fw.api import CausalLM, PeftPlugin
from fw_plugins.peft.changed import refuse_unknown
from fw_plugins.peft.virtual import SAID_BY_THE_MODEL, VirtualTokens, VirtualTokensConfig

_BEGINNING = {"init_weights", "encoder_hidden_size", "prefix_projection"}
"""A network that made keys and values while peft trained; its files hold what it made last."""


@dataclass
class PrefixConfig(VirtualTokensConfig):
    """How many virtual tokens, and how their keys and values begin."""

    tokens: int = 20
    """Virtual tokens whose keys and values every token of a sequence sees, in every block: 2 · blocks · width of keys each, which train.
    Attention takes as many tokens more; the rest of a block does not."""


class Prefix(VirtualTokens):
    """Prefix tuning: keys and values of virtual tokens in every block train (Li and Liang 2021, https://arxiv.org/abs/2101.00190).

    They train themselves; the paper's network that makes them while training is not there.
    """

    api = 1
    Config = PrefixConfig
    config: PrefixConfig
    peft_types: ClassVar[tuple[str, ...]] = ("PREFIX_TUNING",)
    peft_type = "PREFIX_TUNING"

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """As peft's ``PrefixTuningConfig``."""
        refuse_unknown(raw, {"peft_type", "num_virtual_tokens"} | SAID_BY_THE_MODEL | _BEGINNING)
        return cls(PrefixConfig(tokens=raw.get("num_virtual_tokens") or 0))

    def add(self, model: CausalLM) -> str:
        """Keys and values."""
        return model.add_prefix(self.config.tokens)

    def described(self, model: CausalLM) -> dict[str, Any]:
        """Heads of keys, and what a token has in one block."""
        shape = model.kv_shapes[0]
        return {"token_dim": shape.heads * shape.head_dim, "num_attention_heads": shape.heads, "prefix_projection": False}
