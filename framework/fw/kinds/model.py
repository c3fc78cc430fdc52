"""The contract of ``model``: a causal language model that sharding, training and checkpoints can handle without knowing it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fw.kinds.attention import AttentionPlugin
from fw.registry import Plugin

Head = Callable[[Tensor], Tensor]
"""Maps hidden states ``[..., D]`` to logits ``[..., V]``."""
Readout = Callable[[Tensor, Head], Tensor]
"""Takes the last hidden states ``[B, L, D]`` and the head; what it returns, forward returns."""


@dataclass(frozen=True)
class Init:
    """How a parameter begins: ``normal`` with mean 0 and ``std``, or the constant ``value``."""

    std: float = 0.0
    value: float = 0.0


class CausalLM(nn.Module):
    """What every model is. Built on the meta device; weights come from a checkpoint or from :meth:`init`.

    A model keeps no buffers: what can be computed from its configuration is computed in forward.
    """

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The repeated transformer blocks, in order: the units of sharding, recomputation and compilation."""

    @abstractmethod
    def forward(self, ids_BL: Tensor, *, positions_BL: Tensor | None = None, readout: Readout | None = None) -> Tensor:
        """Logits ``[B, L, V]`` of the token ids, or what ``readout`` makes of the last hidden states.

        The readout runs inside forward, where sharding has gathered the head's weights.

        Args:
            positions_BL: position of each token; 0 … L-1 where None.
        """

    @abstractmethod
    def init(self, name: str) -> Init:
        """How the parameter called ``name`` begins."""

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> float:
        """Floating-point operations of forward and backward per token; the docstring gives the formula."""

    @abstractmethod
    def undecayed(self) -> frozenset[str]:
        """Names of the parameters that weight decay must leave alone: norms, biases and embeddings."""

    def hf_name(self, name: str) -> str:
        """The parameter's name in a Hugging Face checkpoint of this architecture; one to one."""
        return name


class ModelPlugin(Plugin):
    """Builds the model and says what its Hugging Face configuration is."""

    kind: ClassVar[str] = "model"

    @property
    @abstractmethod
    def vocab_size(self) -> int | None:
        """Rows of the embedding, or None to take the tokenizer's."""

    @abstractmethod
    def build(self, vocab_size: int, attention: AttentionPlugin) -> CausalLM:
        """The model. Called under ``torch.device("meta")``, on every rank; must not read files or depend on the rank."""

    @abstractmethod
    def hf_config(self, vocab_size: int, sequence_length: int) -> dict[str, Any]:
        """What goes into ``config.json`` so that transformers loads the checkpoint."""
