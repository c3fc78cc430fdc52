"""Prompt tuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fw.api import Adapters, CausalLM, HFTensor, Init, PeftPlugin, StepSpec, UserError
from fw_plugins.peft.changed import begun_from, refuse_unknown

_READ = {"peft_type", "num_virtual_tokens", "num_transformer_submodules"}
_BEGINNING = {
    *("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs", "token_dim", "num_layers"),
    *("num_attention_heads", "random_init"),
}
"""How an adapter began, or said by the model."""


@dataclass
class PromptConfig:
    """How many virtual tokens, and how they begin."""

    tokens: int = 20
    """Virtual tokens before every sequence. Each is as wide as the model, and takes what a token takes in every step: activations grow by
    tokens / sequence length."""
    std: float = 0.02
    """Standard deviation of their initial embeddings. No effect on memory."""
    adapter: str = ""
    """Directory of an adapter to begin from, of fw's or peft's; empty for a new one."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"peft.tokens: {self.tokens} is too small; the least is 1")
        if self.std < 0:
            raise UserError(f"peft.std: {self.std} is negative")


class Prompt(PeftPlugin):
    """Prompt tuning: embeddings of virtual tokens before every sequence train (Lester et al. 2021, https://arxiv.org/abs/2104.08691)."""

    api = 1
    Config = PromptConfig
    config: PromptConfig
    peft_types: ClassVar[tuple[str, ...]] = ("PROMPT_TUNING",)

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """As peft's ``PromptTuningConfig``."""
        refuse_unknown(raw, _READ | _BEGINNING)
        return cls(PromptConfig(tokens=raw.get("num_virtual_tokens") or 0))

    def check(self, model: CausalLM, spec: StepSpec) -> None:
        """Virtual tokens stand before a row, which must be one document's."""
        if spec.segments and not spec.lengths_vary:
            raise UserError(
                "peft.tokens: virtual tokens stand before a row, and these rows hold several documents that do not see each other; set"
                " train.packing=false, data.isolate_documents=false"
            )

    def apply(self, model: CausalLM) -> Adapters:
        """One parameter."""
        model.requires_grad_(False)
        name = model.add_prompt(self.config.tokens)
        config = {
            "peft_type": "PROMPT_TUNING",
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "num_virtual_tokens": self.config.tokens,
            "num_transformer_submodules": 1,
            "token_dim": model.get_parameter(name).shape[1],
            "num_layers": len(model.blocks),
            "prompt_tuning_init": "RANDOM",
        }
        begun = begun_from(self.config.adapter, config, {"peft_type": "", "num_virtual_tokens": 0})
        because = "virtual tokens stand before whole sequences"
        init = {name: Init(std=self.config.std)}
        return Adapters(init, {name: HFTensor("prompt_embeddings")}, config, {}, begun, because, undecayed=frozenset(init))
