"""GPT-NeoX (Black et al. 2022, https://arxiv.org/abs/2204.06745) and Pythia: attention and feed-forward side by side.

B rows, L positions, D width, N heads, H numbers of a head of which R are turned by rotary positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fw.api import AttentionPlugin, CausalLM, HFTensor, KVShape, LinearHead, ModelPlugin, Pattern, Readout, UserError


@dataclass
class GPTNeoXConfig:
    """The shape, with Hugging Face's names."""

    hidden_size: int = 512
    """Width. Parameters grow with its square, activations in proportion."""
    num_hidden_layers: int = 6
    """Blocks; parameters and activations grow in proportion."""
    num_attention_heads: int = 8
    """Heads; a divisor of hidden_size. No effect on memory."""
    intermediate_size: int = 2048
    """Width of the feed-forward network; parameters and activations grow in proportion."""
    vocab_size: int | None = None
    """Rows of the embedding; empty for the tokenizer's."""
    max_position_embeddings: int | None = None
    """Longest context that it claims; empty for train.sequence_length."""
    rotary_pct: float = 0.25
    """Part of a head that is turned."""
    layer_norm_eps: float = 1e-5
    """Added to the variance in norms."""

    def __post_init__(self) -> None:
        if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
            raise UserError(f"model.num_attention_heads: {self.num_attention_heads} does not divide hidden_size {self.hidden_size}")
        if not 0 < self.rotary_pct <= 1 or self.turned % 2:
            raise UserError(f"model.rotary_pct: {self.rotary_pct} leaves {self.turned} numbers of a head to be turned, which come in pairs")

    @property
    def turned(self) -> int:
        """Numbers of a head that are."""
        return int(self.hidden_size // self.num_attention_heads * self.rotary_pct)


def rotated(x_BNLH: Tensor, cos_B1LR: Tensor, sin_B1LR: Tensor) -> Tensor:
    turned, rest = x_BNLH.split([cos_B1LR.shape[-1], x_BNLH.shape[-1] - cos_B1LR.shape[-1]], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos_B1LR.to(x_BNLH.dtype) + torch.cat([-second, first], -1) * sin_B1LR.to(x_BNLH.dtype)
    return torch.cat([turned, rest], -1)


class Attention(nn.Module):
    def __init__(self, c: GPTNeoXConfig, attention: AttentionPlugin) -> None:
        super().__init__()
        self.heads, self.attention = c.num_attention_heads, attention
        self.query_key_value, self.dense = nn.Linear(c.hidden_size, 3 * c.hidden_size), nn.Linear(c.hidden_size, c.hidden_size)

    def forward(self, x_BLD: Tensor, angles: tuple[Tensor, Tensor], plan: Any) -> Tensor:
        q, k, v = self.query_key_value(x_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        out = self.attention.attend(rotated(q, *angles), rotated(k, *angles), v, plan, scale=q.shape[-1] ** -0.5)
        return self.dense(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: GPTNeoXConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(c.hidden_size, c.intermediate_size)
        self.dense_4h_to_h = nn.Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(x_BLD)))


class Block(nn.Module):
    def __init__(self, c: GPTNeoXConfig, attention: AttentionPlugin) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.LayerNorm(c.hidden_size, c.layer_norm_eps) for _ in range(2))
        self.attention, self.mlp = Attention(c, attention), MLP(c)

    def forward(self, x_BLD: Tensor, angles: tuple[Tensor, Tensor], plan: Any) -> Tensor:
        return x_BLD + self.attention(self.input_layernorm(x_BLD), angles, plan) + self.mlp(self.post_attention_layernorm(x_BLD))


class Transformer(CausalLM):
    def __init__(self, c: GPTNeoXConfig, vocab_size: int, sequence_length: int, attention: AttentionPlugin) -> None:
        super().__init__()
        self.c, self.vocab_size, self.attention = c, vocab_size, attention
        self.context = c.max_position_embeddings or sequence_length
        self.embed_in = nn.Embedding(vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, attention) for _ in range(c.num_hidden_layers))
        self.final_layer_norm = nn.LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.embed_out = nn.Linear(c.hidden_size, vocab_size, bias=False)

    def forward(
        self, ids_BL: Tensor, *, positions_BL: Tensor | None = None, segments_BL: Tensor | None = None, readout: Readout | None = None
    ) -> Tensor:
        if positions_BL is None:
            positions_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device)[None]
            if segments_BL is not None:  # counted anew where a segment begins
                begins_BL = torch.ones_like(segments_BL, dtype=torch.bool)
                begins_BL[:, 1:] = segments_BL[:, 1:] != segments_BL[:, :-1]
                positions_BL = positions_BL - torch.where(begins_BL, positions_BL, 0).cummax(1).values
        exponents = torch.arange(0, self.c.turned, 2, device=ids_BL.device).float() / self.c.turned
        angles_BLr = positions_BL[..., None].float() / 10_000.0**exponents
        angles_B1LR = torch.cat([angles_BLr, angles_BLr], -1)[:, None]
        angles = angles_B1LR.cos(), angles_B1LR.sin()
        plan = self.attention.plan(Pattern(ids_BL.shape[1], None, segments_BL), ids_BL.device)
        x_BLD = self.embed_in(ids_BL)
        for layer in self.layers:
            x_BLD = layer(x_BLD, angles, plan)
        x_BLD = self.final_layer_norm(x_BLD)
        return self.embed_out(x_BLD) if readout is None else readout(x_BLD, LinearHead.of(self.embed_out) or self.embed_out, None)

    blocks = property(lambda self: list(self.layers))

    @property
    def kv_shapes(self) -> list[KVShape]:
        return [KVShape(self.c.num_attention_heads, self.c.hidden_size // self.c.num_attention_heads)] * self.c.num_hidden_layers

    def flops_per_token(self, sequence_length: int) -> float:
        """Six for each weight that multiplies, and attention's (Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, appendix B)."""
        multiplied = sum(p.numel() for name, p in self.named_parameters() if p.dim() > 1 and not name.startswith("embed_in"))
        return 6.0 * multiplied + 12.0 * self.c.num_hidden_layers * self.c.hidden_size * sequence_length

    def hf_config(self) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": self.c.rotary_pct}
        same = {name: getattr(self.c, name) for name in _SAME}
        sizes = {"vocab_size": self.vocab_size, "max_position_embeddings": self.context}
        return {
            "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], **same, **sizes, "rope_parameters": rope,
            **_BUILT, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        }  # fmt: skip

    hf_prefix = "gpt_neox."

    def hf_tensors(self, name: str) -> tuple[HFTensor, ...]:
        return (HFTensor(name if name.startswith("embed_out") else f"gpt_neox.{name}"),)


_BUILT = {"use_parallel_residual": True, "hidden_act": "gelu", "tie_word_embeddings": False, "attention_bias": True}
_SAME = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "layer_norm_eps")


class GPTNeoX(ModelPlugin):
    """GPT-NeoX and Pythia of any shape: blocks of attention and feed-forward side by side, rotary positions in part of a head."""

    api = 1
    Config = GPTNeoXConfig
    hf_model_types = ("gpt_neox",)
    tested_with = {"optimizer": ("adabelief",)}

    @classmethod
    def from_hf(cls, raw, changes) -> ModelPlugin:
        """As a config.json says; what is not built here is refused."""
        for name, built in (
            ("use_parallel_residual", True),
            ("hidden_act", "gelu"),
            ("tie_word_embeddings", False),
            ("attention_bias", True),
        ):
            if raw.get(name, built) != built:
                raise UserError(f"config.json: {name}: {raw[name]} is not built by fw-gpt-neox, which has {built}")
        rope = raw.get("rope_parameters") or {}
        if rope.get("rope_theta", raw.get("rotary_emb_base", 10_000)) != 10_000 or rope.get("rope_type", "default") != "default":
            raise UserError("config.json: rope_parameters: fw-gpt-neox has the usual ones of base 10,000 alone")
        own = {name: raw[name] for name in (*_SAME, "vocab_size", "max_position_embeddings") if name in raw}
        return cls(cls.Config(**{**own, "rotary_pct": rope.get("partial_rotary_factor", raw.get("rotary_pct", 0.25)), **changes}))

    @property
    def vocab_size(self) -> int | None:
        """As configured."""
        return self.config.vocab_size

    def build(self, vocab_size: int, sequence_length: int, attention: AttentionPlugin) -> CausalLM:
        """On the meta device."""
        return Transformer(self.config, vocab_size, sequence_length, attention)
