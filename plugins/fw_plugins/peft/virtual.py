"""What prompt and prefix tuning share: virtual tokens before every sequence, one parameter that trains."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fw.api import Adapters, CausalLM, HFTensor, Init, PeftPlugin, StepSpec, UserError
from fw_plugins.peft.changed import begun_from

SAID_BY_THE_MODEL = {"token_dim", "num_layers", "num_attention_heads", "num_transformer_submodules"}
"""Of ``adapter_config.json``."""


@dataclass
class VirtualTokensConfig:
    """How many virtual tokens, and how they begin."""

    tokens: int = 20
    """Virtual tokens before every sequence."""
    std: float = 0.02
    """Standard deviation of their initial values. No effect on memory."""
    adapter: str = ""
    """Directory of an adapter to begin from, of fw's or peft's; empty for a new one."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"peft.tokens: {self.tokens} is too small; the least is 1")
        if self.std < 0:
            raise UserError(f"peft.std: {self.std} is negative")


class VirtualTokens(PeftPlugin):
    """One parameter of the model trains, of as many rows as there are virtual tokens."""

    config: VirtualTokensConfig
    peft_type: ClassVar[str]

    @abstractmethod
    def add(self, model: CausalLM) -> str:
        """Give the model its parameter, by whose name it is known from now on."""

    @abstractmethod
    def described(self, model: CausalLM) -> dict[str, Any]:
        """What ``adapter_config.json`` says of its shape."""

    def check(self, model: CausalLM, spec: StepSpec) -> None:
        """Virtual tokens stand before a row, which must be one document's."""
        if spec.segments and not spec.lengths_vary:
            raise UserError(
                "peft.tokens: virtual tokens stand before a row, and these rows hold several documents that do not see each other; set"
                " train.packing=false, data.isolate_documents=false"
            )

    def apply(self, model: CausalLM) -> Adapters:
        """One parameter."""
        options = self.config
        model.requires_grad_(False)
        name = self.add(model)
        model.virtual_tokens = options.tokens
        config = {
            "peft_type": self.peft_type,
            "task_type": "CAUSAL_LM",
            "inference_mode": True,
            "num_virtual_tokens": options.tokens,
            "num_transformer_submodules": 1,
            "num_layers": len(model.blocks),
            **self.described(model),
        }
        begun = begun_from(options.adapter, config, {"peft_type": "", "num_virtual_tokens": 0})
        because = "virtual tokens stand before whole sequences"
        init: Mapping[str, Init] = {name: Init(std=options.std)}
        return Adapters(init, {name: HFTensor("prompt_embeddings")}, config, {}, begun, because, undecayed=frozenset(init))
