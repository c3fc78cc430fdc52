"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088): Mistral with a mixture of experts for a feed-forward network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from fw.api import HFTensor, UserError
from fw_models.decoder import Block, Decoder
from fw_models.hf_config import HFNames, read_rope
from fw_models.layers import Attention, MoE, balance_loss
from fw_models.mistral import MistralConfig


@dataclass
class ExpertsConfig:
    """What mixtures of experts have in common. Every expert takes parameters, gradients and optimizer state; each token computes a few."""

    num_experts_per_tok: int = 2
    """Experts a token is sent to. Activations of the feed-forward network grow in proportion."""
    output_router_logits: bool = True
    """Add the routers' balance to the loss in training (transformers' name and meaning)."""
    router_aux_loss_coef: float = 0.001
    """Weight of that balance: experts · Σ (share of tokens) · (mean probability), about num_experts_per_tok when balanced."""

    def check_experts(self, experts: int) -> None:
        """Refuse a router that could not choose.

        Raises:
            UserError: more experts per token than there are, or a negative weight.
        """
        if not 1 <= self.num_experts_per_tok <= experts:
            raise UserError(f"model.num_experts_per_tok: {self.num_experts_per_tok} is not between 1 and the {experts} experts")
        if self.router_aux_loss_coef < 0:
            raise UserError(f"model.router_aux_loss_coef: {self.router_aux_loss_coef} is below 0")


@dataclass
class MixtralConfig(ExpertsConfig, MistralConfig):
    """Mixtral."""

    num_local_experts: int = 8
    """Experts per block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_experts(self.num_local_experts)


class ExpertsDecoder(Decoder):
    """A decoder whose blocks may route: what active parameters, initial weights and the loss make of it."""

    config: MixtralConfig

    def active_parameters(self) -> int:
        """All but the experts a token is not sent to."""
        total = 0
        for name, parameter in self.named_parameters():
            size = parameter.numel()
            total += size * self.config.num_experts_per_tok // parameter.shape[0] if ".experts." in name else size
        return total

    def auxiliary_loss(self, routed: Sequence[Tensor], segments_BL: Tensor | None) -> Tensor | None:
        """The weighted balance, where it is asked for."""
        c = self.config
        if not (c.output_router_logits and c.router_aux_loss_coef):
            return None
        counted_BL = None if segments_BL is None else segments_BL > 0
        return c.router_aux_loss_coef * balance_loss(routed, c.num_experts_per_tok, counted_BL, self.over_ranks)


_EXPERT = re.compile(r"(layers\.\d+)\.mlp\.experts\.(gate|up|down)_proj")
_FILE_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


class Mixtral(ExpertsDecoder):
    """Mixtral."""

    config: MixtralConfig
    hf = HFNames(
        "mixtral",
        "MixtralForCausalLM",
        {
            "vocab_size": 32000,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rope_theta": 1000000.0,
            "output_router_logits": False,
        },
        {"hidden_act": "silu", "router_jitter_noise": 0.0},
        read_rope,
    )

    def block(self, layer: int) -> nn.Module:
        """Experts in every block; the chosen ones' probabilities add up to one."""
        c = self.config
        moe = MoE(c.hidden_size, c.intermediate_size, c.num_local_experts, c.num_experts_per_tok, normalise=True)
        return Block(c, Attention(c.attention_shape(), self.attention), moe)

    def hf_tensors(self, name: str) -> Sequence[HFTensor]:
        """Each expert has tensors of its own in the file: ``layers.0.mlp.experts.up_proj`` is all ``…experts.E.w3.weight``."""
        if found := _EXPERT.fullmatch(name):
            where, which = f"model.{found[1]}.block_sparse_moe.experts", _FILE_NAMES[found[2]]
            return [HFTensor(f"{where}.{expert}.{which}.weight", expert) for expert in range(self.config.num_local_experts)]
        return super().hf_tensors(name.replace(".mlp.", ".block_sparse_moe."))

    def hf_module_name(self, name: str) -> str:
        """Since its fifth version transformers has one name for all mixtures."""
        return name.replace(".block_sparse_moe.", ".mlp.")
