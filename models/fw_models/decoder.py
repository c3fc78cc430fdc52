"""What the architectures with rotary positions and RMSNorm share: the block, and the way through a model.

Shape suffixes as in :mod:`fw_models.layers`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
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
    Rescaling,
    TensorPlan,
    UserError,
    Width,
    adapters_are_off,
    positions,
)
from fw_models.decoder_config import DecoderConfig
from fw_models.hf_config import HFNames, write
from fw_models.layers import (
    Angles,
    Attention,
    GatedMLP,
    Prefixed,
    RMSNorm,
    ShiftedRMSNorm,
    prepend,
    segments_with,
)
from fw_models.layers.embedding import embedding
from fw_models.virtual_tokens import WithVirtualTokens


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: DecoderConfig, attention: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(self, x_BLD: Tensor, angles: Angles, plan: Any) -> Tensor | tuple[Tensor, Tensor]:
        """``[B, L, D]`` → ``[B, L, D]``, with the router's logits ``[B, L, E]`` where the block has one."""
        x_BLD = x_BLD + self.self_attn(self.input_layernorm(x_BLD), angles, plan)
        out = self.mlp(self.post_attention_layernorm(x_BLD))
        return (x_BLD + out[0], out[1]) if isinstance(out, tuple) else x_BLD + out


class Decoder(WithVirtualTokens):
    """Embedding, blocks, final norm, head. An architecture says what a block is and how its config.json reads."""

    hf: ClassVar[HFNames]
    hf_prefix: ClassVar[str] = "model."
    config: DecoderConfig

    def __init__(self, config: DecoderConfig, vocab_size: int, sequence_length: int, attention: AttentionPlugin) -> None:
        super().__init__()
        if config.pad_token_id is not None and not -vocab_size <= config.pad_token_id < vocab_size:
            raise UserError(f"model.pad_token_id: {config.pad_token_id} is no row of an embedding of {vocab_size}")
        self.config = config
        self.vocab_size = vocab_size
        self.context = config.max_position_embeddings or sequence_length
        self.attention = attention
        self.embed_tokens = embedding(vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(self.block(layer) for layer in range(config.num_hidden_layers))
        self.norm = self.final_norm()
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, vocab_size, bias=False)

    def block(self, layer: int) -> nn.Module:
        """Block number ``layer``."""
        config = self.config
        return Block(config, Attention(config.attention_shape(), self.attention), GatedMLP(config.hidden_size, config.intermediate_size))

    def final_norm(self) -> nn.Module:
        """The norm before the head."""
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer blocks, in order."""
        return list(self.layers)

    @property
    def own_embedding(self) -> nn.Module | None:
        """Unless it is the head, too."""
        return None if self.lm_head is None else self.embed_tokens

    @property
    def own_head(self) -> nn.Module | None:
        """Unless it is the embedding."""
        return self.lm_head

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """Keys and values of each block."""
        c = self.config
        return [KVShape(c.kv_heads, c.head_size, c.window(layer)) for layer in range(c.num_hidden_layers)]

    def forward(
        self, ids_BL: Tensor, *, positions_BL: Tensor | None = None, segments_BL: Tensor | None = None, readout: Readout | None = None
    ) -> Tensor:
        """Logits ``[B, L, V]``, or what ``readout`` makes of the hidden states."""
        if positions_BL is None:
            positions_BL = positions(ids_BL, segments_BL)
        x_BLD, virtual = self.embed(ids_BL), 0
        if self.prompt_embeddings is not None and not adapters_are_off():
            virtual = len(self.prompt_embeddings)
            x_BLD, positions_BL, segments_BL = prepend(self.prompt_embeddings, x_BLD, positions_BL, segments_BL)
        prefix, before, seen_BL = self.prefix(), virtual, segments_BL
        if prefix:  # whose tokens attention has, and rows have not
            before = self.virtual_tokens
            positions_BL, seen_BL = positions_BL + before, segments_with(before, segments_BL)
        windows = [self.config.window(layer) for layer in range(len(self.layers))]
        ropes = [self.config.rope(layer) for layer in range(len(self.layers))]
        # Once per forward for all blocks that share them.
        length = before + ids_BL.shape[1]  # of which x may be this rank's part
        plans = {w: self.attention.plan(Pattern(length, w, seen_BL), ids_BL.device) for w in dict.fromkeys(windows)}
        angles = {rope: rope.angles(positions_BL) for rope in dict.fromkeys(ropes)}
        routed: list[Tensor] = []
        for number, (layer, window, rope) in enumerate(zip(self.layers, windows, ropes, strict=True)):
            plan = Prefixed(plans[window], *prefix[number]) if prefix else plans[window]
            x_BLD = layer(x_BLD, angles[rope], plan)
            if isinstance(x_BLD, tuple):
                x_BLD, logits_BLE = x_BLD
                routed.append(logits_BLE)
        auxiliary = self.auxiliary_loss(routed, segments_BL) if self.training and routed else None

        def out(x_BLD: Tensor) -> Tensor:
            if readout is None:
                return self.head(x_BLD)
            return readout(x_BLD, LinearHead.of(self.lm_head or self.embed_tokens, self.final_softcap) or self.head, auxiliary)

        x_BLD = self.norm(x_BLD[:, virtual:] if virtual else x_BLD)  # what it is of is held no longer than autograd does
        return self.around_head(x_BLD, out)

    @property
    def embedding_width(self) -> int:
        """The model's."""
        return self.config.hidden_size

    def embed(self, ids_BL: Tensor) -> Tensor:
        """``[B, L]`` → ``[B, L, D]``."""
        return self.embed_tokens(ids_BL)

    def head(self, x_BLD: Tensor) -> Tensor:
        """``[…, D]`` → ``[…, V]``."""
        # Tied weights are one parameter used twice, never two names for one: nothing to keep in step when it is sharded or loaded.
        logits = F.linear(x_BLD, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x_BLD)
        cap = self.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def final_softcap(self) -> float | None:
        """Bound of the logits; None for none."""
        return None

    def auxiliary_loss(self, routed: Sequence[Tensor], segments_BL: Tensor | None) -> Tensor | None:
        """What the routers add to the loss, weighted, from their logits ``[B, L, E]``."""
        return None

    def init(self, name: str) -> Init:
        """Normal weights, biases zero; norms start at one."""
        if "norm" in name:
            return Init(value=1.0)
        if name.endswith(".bias"):
            return Init(value=0.0)
        std = self.config.initializer_range
        if self.config.depth_scaled_init and name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
            std /= math.sqrt(2 * self.config.num_hidden_layers)
        return Init(std=std)

    def flops_per_token(self, sequence_length: int) -> float:
        """``6 · (parameters in matrix products) + 12 · Σ_layers heads · head_dim · min(length, window)``.

        Chowdhery et al. 2022, appendix B (https://arxiv.org/abs/2204.02311): 2 per multiply-add, forward once and backward twice; the
        attention product is counted in full, as there, though half of it is masked. Looking up an embedding is no product. Of experts
        count those that a token is sent to.
        """
        c = self.config
        outside = sum(p.numel() for p in self.parameters() if p.dim() < 2)
        if self.lm_head is not None:
            outside += self.embed_tokens.weight.numel()
        seen = sum(min(sequence_length, shape.window or sequence_length) for shape in self.kv_shapes)
        return 6.0 * (self.active_parameters() - outside) + 12.0 * c.num_attention_heads * c.head_size * seen

    def tensor_plan(self) -> TensorPlan:
        """Heads, features of the feed-forward network and vocabulary; a single key and value head is every rank's."""
        c = self.config
        divided = "qkv" if c.kv_heads > 1 else "q"
        return TensorPlan(
            split={
                "embed_tokens.weight": 0,
                "lm_head.weight": 0,
                **{f"layers.*.self_attn.{which}_proj.{part}": 0 for which in divided for part in ("weight", "bias")},
                "layers.*.self_attn.o_proj.weight": 1,
                **{f"layers.*.mlp.{which}_proj.{part}": 0 for which in ("gate", "up") for part in ("weight", "bias")},
                "layers.*.mlp.down_proj.weight": 1,
                "layers.*.mlp.experts.gate_proj": 1,
                "layers.*.mlp.experts.up_proj": 1,
                "layers.*.mlp.experts.down_proj": 2,
            },
            vocabulary=frozenset({"embed_tokens"}),
            whole_input=frozenset({"layers.*.self_attn", "layers.*.mlp"}),
            partial_output=frozenset({"layers.*.self_attn", "layers.*.mlp"}),
            whole_output=frozenset({"norm"}),
            once=frozenset({"layers.*.self_attn.o_proj.bias", "layers.*.mlp.down_proj.bias"}),
            sizes={
                "attention heads": c.num_attention_heads,
                **({"key and value heads": c.kv_heads} if c.kv_heads > 1 else {}),
                "features of the feed-forward network": self.feed_forward_size,
            },
        )

    def widths(self) -> Mapping[str, Width]:
        """Features of a dense feed-forward network, and key and value heads with the query heads that share them."""
        c = self.config
        rows, queries = c.head_size, c.num_attention_heads // c.kv_heads
        attention = {f"self_attn.{which}_proj": (0, rows * (queries if which == "q" else 1)) for which in "qkv"}
        heads = {f"{name}.{part}": how for name, how in attention.items() for part in ("weight", "bias")}
        fields = {"num_attention_heads": queries, "num_key_value_heads": 1}
        found = {"heads": Width(c.kv_heads, fields, "self_attn.o_proj", {**heads, "self_attn.o_proj.weight": (1, rows * queries)})}
        if not all(isinstance(getattr(layer, "mlp", None), GatedMLP) for layer in self.layers):
            return found
        inner = {f"mlp.{which}_proj.{part}": (0, 1) for which in ("gate", "up") for part in ("weight", "bias")}
        return {
            **found,
            "features": Width(c.intermediate_size, {"intermediate_size": 1}, "mlp.down_proj", {**inner, "mlp.down_proj.weight": (1, 1)}),
        }

    def rescalings(self, block: int) -> Sequence[Rescaling]:
        """Norms before projections; values before the output, where each head has its own; what a gate multiplies."""
        layer, c = self.layers[block], self.config

        def norm(name: str) -> dict[str, float]:
            return {f"{name}.weight": 1.0 if isinstance(layer.get_submodule(name), ShiftedRMSNorm) else 0.0}

        def rows(name: str) -> dict[str, float]:
            return {f"{name}.{part}": 0.0 for part, parameter in layer.get_submodule(name).named_parameters()}

        found = [Rescaling(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), norm("input_layernorm"))]
        if c.kv_heads == c.num_attention_heads:
            found.append(Rescaling(("self_attn.o_proj",), rows("self_attn.v_proj")))
        if isinstance(layer.mlp, GatedMLP):
            before = "pre_feedforward_layernorm" if hasattr(layer, "pre_feedforward_layernorm") else "post_attention_layernorm"
            found.append(Rescaling(("mlp.gate_proj", "mlp.up_proj"), norm(before)))
            found.append(Rescaling(("mlp.down_proj",), rows("mlp.up_proj")))
        return found

    @property
    def feed_forward_size(self) -> int:
        """Features inside a feed-forward network; of several kinds of them, what divides all."""
        return self.config.intermediate_size

    def whole_sequences_because(self) -> str:
        """Only where the longest position decides the angles of all."""
        if because := super().whole_sequences_because():
            return because
        scaling = self.config.rope_scaling
        dynamic = scaling is not None and scaling.rope_type == "dynamic"
        return "model.rope_scaling of type dynamic depends on the longest position of the batch" if dynamic else ""

    def hf_config(self) -> dict[str, Any]:
        """``config.json`` of transformers' class for this architecture."""
        return self._written(self.config)

    def hf_config_of(self, blocks: Sequence[int]) -> dict[str, Any]:
        """With their windows, and what else goes by a block's number."""
        return self._written(dataclasses.replace(self.config, **self.config.of_blocks(blocks)))

    def _written(self, config: DecoderConfig) -> dict[str, Any]:
        filled = {
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.context,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_size,
        }
        return write(config, self.hf, filled)

    def hf_tensors(self, name: str) -> Sequence[HFTensor]:
        """``layers.0.mlp.up_proj.weight`` → ``model.layers.0.mlp.up_proj.weight``; the head stands outside ``model``."""
        return (HFTensor(name if name.startswith("lm_head.") else f"model.{name}"),)

    def hf_repeated(self) -> Mapping[str, str]:
        """A tied head, which some files hold besides."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.lm_head is None else {}

    def hf_superfluous(self, name: str) -> bool:
        """Rotary frequencies, which files written by old versions of transformers hold."""
        return name.endswith(".rotary_emb.inv_freq")
