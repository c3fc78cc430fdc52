"""What peft may put before every sequence of a model: embeddings of virtual tokens, or their keys and values."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from fw.api import CausalLM, adapters_are_off
from fw_models.layers import by_block, prefix_width


class WithVirtualTokens(CausalLM):
    """A model whose forward honours :attr:`prompt_embeddings` and :meth:`prefix`."""

    prompt_embeddings: nn.Parameter | None
    prefix_embeddings: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("prompt_embeddings", None)
        self.register_parameter("prefix_embeddings", None)

    @property
    @abstractmethod
    def embedding_width(self) -> int:
        """Of a token before the first block."""

    def check_room(self, tokens: int) -> None:
        """Refuse more virtual tokens than there can be. Here: never.

        Raises:
            UserError: with how many there can be.
        """

    def add_prompt(self, tokens: int) -> str:
        """Before the first block."""
        self.check_room(tokens)
        self.virtual_tokens = tokens
        self.prompt_embeddings = nn.Parameter(torch.empty(tokens, self.embedding_width))
        return "prompt_embeddings"

    def add_prefix(self, tokens: int) -> str:
        """Before every block's keys and values."""
        self.check_room(tokens)
        self.virtual_tokens = tokens
        self.prefix_embeddings = nn.Parameter(torch.empty(tokens, prefix_width(self.kv_shapes)))
        return "prefix_embeddings"

    def prefix(self) -> list[tuple[Tensor, Tensor]]:
        """Each block's keys and values ``[K, P, H]`` of virtual tokens; empty where there are none."""
        if self.prefix_embeddings is None or adapters_are_off():
            return []
        return by_block(self.prefix_embeddings, self.kv_shapes[0].head_dim, len(self.blocks))

    def whole_sequences_because(self) -> str:
        """Virtual tokens stand against it."""
        return "virtual tokens (peft=prompt, peft=prefix) stand before whole ones" if self.virtual_tokens else ""
