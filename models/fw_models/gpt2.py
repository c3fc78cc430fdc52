"""GPT-2 (Radford et al. 2019): learnt positions, LayerNorm, biases, one projection for queries, keys and values, GELU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fw.api import (
    AttentionPlugin,
    HFTensor,
    Init,
    KVShape,
    LinearHead,
    Pattern,
    Readout,
    TensorPlan,
    UserError,
    adapters_are_off,
    positions,
)
from fw_models.hf_config import HFNames, write
from fw_models.layers import ACTIVATIONS, Prefixed, attend, prepend, segments_with
from fw_models.layers.embedding import embedding
from fw_models.virtual_tokens import WithVirtualTokens


@dataclass
class GPT2Config:
    """The shape of a GPT-2, with Hugging Face's names."""

    n_embd: int = 768
    """Width of the residual stream. Parameters grow with its square, activations in proportion."""
    n_layer: int = 12
    """Transformer blocks. Parameters and activations grow in proportion."""
    n_head: int = 12
    """Heads; divides n_embd."""
    n_inner: int | None = None
    """Width of the feed-forward network; empty for 4 · n_embd."""
    n_positions: int = 1024
    """Longest context: the table of positions has n_positions · n_embd parameters."""
    vocab_size: int | None = None
    """Rows of the embedding; may exceed the tokenizer's. Empty for the tokenizer's. Logits take vocab_size × 4 bytes per token."""
    activation_function: str = "gelu_new"
    """Of the feed-forward network: gelu_new (tanh approximation), gelu, relu, silu."""
    layer_norm_epsilon: float = 1e-5
    """Added to the variance in LayerNorm."""
    embd_pdrop: float = 0.0
    """Probability with which an entry of the embeddings is dropped in training."""
    attn_pdrop: float = 0.0
    """Probability with which an attention weight is dropped in training."""
    resid_pdrop: float = 0.0
    """Probability with which an entry of what a block adds is dropped in training."""
    scale_attn_weights: bool = True
    """Divide scores by √(n_embd ÷ n_head)."""
    scale_attn_by_inverse_layer_idx: bool = False
    """Divide scores by the block's number too, counted from 1."""
    tie_word_embeddings: bool = True
    """Use the embedding as output head too: saves vocab_size · n_embd parameters, gradients and optimizer state."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 · layers) for projections that add to the residual stream."""
    bos_token_id: int | None = None
    """Id that begins a text, written to config.json; empty for the tokenizer's."""
    eos_token_id: list[int] | None = None
    """Ids that end a generation, written to config.json; empty for the tokenizer's."""
    pad_token_id: int | None = None
    """Id of padding, written to config.json; empty for none."""

    def __post_init__(self) -> None:
        for name in ("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"model.{name}: {value} is too small; the least is 1")
        if self.n_embd % self.n_head:
            raise UserError(f"model.n_head: {self.n_head} does not divide n_embd {self.n_embd}")
        if self.activation_function not in ACTIVATIONS:
            raise UserError(f"model.activation_function: unknown '{self.activation_function}' (there are: {', '.join(ACTIVATIONS)})")
        for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"model.{name}: {getattr(self, name)} is not between 0 and 1")
        if self.initializer_range < 0 or self.layer_norm_epsilon < 0:
            raise UserError("model.initializer_range and model.layer_norm_epsilon must not be below 0")


class GPT2Attention(nn.Module):
    """Self-attention of n_head heads."""

    def __init__(self, config: GPT2Config, layer: int, attention: AttentionPlugin) -> None:
        super().__init__()
        self.head_dim = config.n_embd // config.n_head
        self.attention = attention
        self.dropout, self.out_dropout = config.attn_pdrop, config.resid_pdrop
        self.scale = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x_BLD: Tensor, plan: Any) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        q_BNLH, k_BNLH, v_BNLH = (
            part_BLD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part_BLD in self.c_attn(x_BLD).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        out_BNLH = attend(self.attention, q_BNLH, k_BNLH, v_BNLH, plan, scale=self.scale, dropout=dropout)
        return F.dropout(self.c_proj(out_BNLH.transpose(1, 2).flatten(2)), self.out_dropout, self.training)


class GPT2MLP(nn.Module):
    """``proj(act(fc(x)))``."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation_function]
        self.dropout = config.resid_pdrop
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, inner)
        self.c_proj = nn.Linear(inner, config.n_embd)

    def forward(self, x_BLD: Tensor) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        return F.dropout(self.c_proj(self.activation(self.c_fc(x_BLD))), self.dropout, self.training)


class GPT2Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: GPT2Config, layer: int, attention: AttentionPlugin) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, layer, attention)
        self.ln_2 = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config)

    def forward(self, x_BLD: Tensor, plan: Any) -> Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        x_BLD = x_BLD + self.attn(self.ln_1(x_BLD), plan)
        return x_BLD + self.mlp(self.ln_2(x_BLD))


class GPT2(WithVirtualTokens):
    """GPT-2."""

    hf: ClassVar[HFNames] = HFNames(
        "gpt2",
        "GPT2LMHeadModel",
        {"vocab_size": 50257, "bos_token_id": 50256, "eos_token_id": 50256, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1},
        {"reorder_and_upcast_attn": False},
        reading=lambda fields: {k: v for k, v in fields.items() if not k.startswith("summary_") and k != "n_ctx"},
    )
    hf_prefix: ClassVar[str] = "transformer."

    def __init__(self, config: GPT2Config, vocab_size: int, sequence_length: int, attention: AttentionPlugin) -> None:
        super().__init__()
        if sequence_length > config.n_positions:
            raise UserError(f"model.n_positions: {config.n_positions} positions do not hold train.sequence_length {sequence_length}")
        self.config = config
        self._sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.context = config.n_positions
        self.attention = attention
        self.wte = embedding(vocab_size, config.n_embd)
        self.wpe = embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(GPT2Block(config, layer, attention) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.n_embd, vocab_size, bias=False)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, in order."""
        return list(self.h)

    @property
    def own_embedding(self) -> nn.Module | None:
        """Unless it is the head, too."""
        return None if self.lm_head is None else self.wte

    @property
    def own_head(self) -> nn.Module | None:
        """Unless it is the embedding."""
        return self.lm_head

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """Keys and values of each block."""
        return [KVShape(self.config.n_head, self.config.n_embd // self.config.n_head)] * self.config.n_layer

    def forward(
        self, ids_BL: Tensor, *, positions_BL: Tensor | None = None, segments_BL: Tensor | None = None, readout: Readout | None = None
    ) -> Tensor:
        """Logits ``[B, L, V]``, or what ``readout`` makes of the hidden states."""
        length = ids_BL.shape[1]
        if positions_BL is None:
            positions_BL = positions(ids_BL, segments_BL)
            own = self.config.n_positions - self.virtual_tokens
            if length > own and int(positions_BL.max()) >= own:
                raise UserError(f"{length} tokens are more than this model has positions for ({own})")
        x_BLD, virtual = self.wte(ids_BL), 0
        if self.prompt_embeddings is not None and not adapters_are_off():
            virtual = len(self.prompt_embeddings)
            x_BLD, positions_BL, segments_BL = prepend(self.prompt_embeddings, x_BLD, positions_BL, segments_BL)
        prefix, before = self.prefix(), virtual
        if prefix:
            before = self.virtual_tokens
            positions_BL, segments_BL = positions_BL + before, segments_with(before, segments_BL)
        plan = self.attention.plan(Pattern(before + length, None, segments_BL), ids_BL.device)  # of x this rank may have a part
        x_BLD = F.dropout(x_BLD + self.wpe(positions_BL), self.config.embd_pdrop, self.training)
        for number, block in enumerate(self.h):
            x_BLD = block(x_BLD, Prefixed(plan, *prefix[number]) if prefix else plan)

        def out(x_BLD: Tensor) -> Tensor:
            if readout is None:
                return self.head(x_BLD)
            return readout(x_BLD, LinearHead.of(self.lm_head or self.wte) or self.head, None)

        x_BLD = self.ln_f(x_BLD[:, virtual:] if virtual else x_BLD)  # what it is of is held no longer than autograd does
        return self.around_head(x_BLD, out)

    def head(self, x_BLD: Tensor) -> Tensor:
        """``[…, D]`` → ``[…, V]``."""
        return F.linear(x_BLD, self.wte.weight) if self.lm_head is None else self.lm_head(x_BLD)

    def init(self, name: str) -> Init:
        """Normal weights, biases zero, norms one (Radford et al. 2019, section 2.3)."""
        if name.endswith(".bias"):
            return Init(value=0.0)
        if ".ln_" in f".{name}":
            return Init(value=1.0)
        std = self.config.initializer_range
        return Init(std=std / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else std)

    def flops_per_token(self, sequence_length: int) -> float:
        """``6 · (parameters in matrix products) + 12 · layers · n_embd · length``, as for the other decoders."""
        products = sum(p.numel() for name, p in self.named_parameters() if p.dim() > 1 and not name.startswith("wpe"))
        if self.lm_head is not None:
            products -= self.wte.weight.numel()
        return 6.0 * products + 12.0 * self.config.n_layer * self.config.n_embd * sequence_length

    def tensor_plan(self) -> TensorPlan:
        """Heads, features of the feed-forward network and vocabulary; queries, keys and values are one projection."""
        inner = self.config.n_inner or 4 * self.config.n_embd
        return TensorPlan(
            split={
                "wte.weight": 0,
                "lm_head.weight": 0,
                "h.*.attn.c_attn.weight": 0,
                "h.*.attn.c_attn.bias": 0,
                "h.*.attn.c_proj.weight": 1,
                "h.*.mlp.c_fc.weight": 0,
                "h.*.mlp.c_fc.bias": 0,
                "h.*.mlp.c_proj.weight": 1,
            },
            vocabulary=frozenset({"wte"}),
            whole_input=frozenset({"h.*.attn", "h.*.mlp"}),
            partial_output=frozenset({"h.*.attn.c_proj", "h.*.mlp.c_proj"}),  # before dropout, which is for the sum
            whole_output=frozenset({"ln_f"}),
            repeated_output=frozenset({"wpe"}),
            fused={"h.*.attn.c_attn": 3},
            once=frozenset({"h.*.attn.c_proj.bias", "h.*.mlp.c_proj.bias"}),
            sizes={
                "attention heads": self.config.n_head,
                "features of the feed-forward network": inner,
            },
        )

    @property
    def embedding_width(self) -> int:
        """The model's."""
        return self.config.n_embd

    def check_room(self, tokens: int) -> None:
        """There are positions for a row and for these."""
        if self._sequence_length + tokens > self.config.n_positions:
            raise UserError(
                f"peft.tokens: {tokens} virtual tokens and rows of {self._sequence_length} need {self._sequence_length + tokens} positions,"
                f" and this model has {self.config.n_positions}; lower train.sequence_length"
            )

    def hf_config(self) -> dict[str, Any]:
        """``config.json`` of ``GPT2LMHeadModel``."""
        return self._written(self.config)

    def hf_config_of(self, blocks: Sequence[int]) -> dict[str, Any]:
        """Unless scores go by a block's number."""
        if self.config.scale_attn_by_inverse_layer_idx and list(blocks) != list(range(self.config.n_layer)):
            raise UserError("--layers: scale_attn_by_inverse_layer_idx divides a block's scores by its number, so no block of it can go")
        return self._written(dataclasses.replace(self.config, n_layer=len(blocks)))

    def _written(self, config: GPT2Config) -> dict[str, Any]:
        return write(config, self.hf, {"vocab_size": self.vocab_size})

    def hf_tensors(self, name: str) -> Sequence[HFTensor]:
        """Under ``transformer.``; the four projections of a block are transposed in the file."""
        transposed = name.startswith("h.") and name.endswith(".weight") and ".ln_" not in name
        return (HFTensor(name if name.startswith("lm_head.") else f"transformer.{name}", transposed=transposed),)

    def hf_repeated(self) -> Mapping[str, str]:
        """A tied head, which some files hold besides."""
        return {"lm_head.weight": "transformer.wte.weight"} if self.lm_head is None else {}

    def hf_superfluous(self, name: str) -> bool:
        """Causal masks, which files written by old versions of transformers hold."""
        return name.endswith((".attn.bias", ".attn.masked_bias"))
