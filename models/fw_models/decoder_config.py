"""What the configurations of these architectures have in common, with Hugging Face's names; and blocks that see a window only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fw.api import UserError
from fw_models.layers import AttentionShape, Rope, RopeScaling


@dataclass
class DecoderConfig:
    """The shape of a decoder, with Hugging Face's names."""

    hidden_size: int = 512
    """Width of the residual stream. Parameters grow with its square, activations in proportion."""
    num_hidden_layers: int = 8
    """Transformer blocks. Parameters and activations grow in proportion."""
    num_attention_heads: int = 8
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads; divides the query heads. Empty for as many as those. The KV cache grows in proportion."""
    head_dim: int | None = None
    """Dimensions per head, even; empty for hidden_size ÷ num_attention_heads."""
    intermediate_size: int = 1376
    """Width of the feed-forward network. Parameters and activations grow in proportion."""
    vocab_size: int | None = None
    """Rows of the embedding; may exceed the tokenizer's. Empty for the tokenizer's. Logits take vocab_size × 4 bytes per token."""
    max_position_embeddings: int | None = None
    """Longest context the model claims to serve; empty for train.sequence_length. No effect on memory."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """How they are stretched over contexts longer than the weights were trained on; empty for not at all."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tie_word_embeddings: bool = False
    """Use the embedding as output head too: saves vocab_size · hidden_size parameters, gradients and optimizer state."""
    attention_dropout: float = 0.0
    """Probability with which an attention weight is dropped in training."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    depth_scaled_init: bool = True
    """Divide it by sqrt(2 · layers) for the two projections of a block that add to the residual stream (GPT-2)."""
    bos_token_id: int | None = None
    """Id that begins a text, written to config.json; empty for the tokenizer's."""
    eos_token_id: list[int] | None = None
    """Ids that end a generation, written to config.json; empty for the tokenizer's."""
    pad_token_id: int | None = None
    """Id of padding: looking it up trains nothing, as in transformers. Empty for none."""

    whole_heads: ClassVar[bool] = False
    """Whether transformers wants the heads to divide the width, though their size is free."""

    def __post_init__(self) -> None:
        shape = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        for name in (*shape, "vocab_size", "max_position_embeddings", "sliding_window"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise UserError(f"model.{name}: {value} is too small; the least is 1")
        if self.rope_theta <= 0 or self.rms_norm_eps < 0 or self.initializer_range < 0:
            raise UserError("model.rope_theta must be above 0, model.rms_norm_eps and model.initializer_range not below")
        if not 0 <= self.attention_dropout < 1:
            raise UserError(f"model.attention_dropout: {self.attention_dropout} is not between 0 and 1")
        if self.num_attention_heads % self.kv_heads:
            raise UserError(f"model.num_key_value_heads: {self.kv_heads} does not divide num_attention_heads {self.num_attention_heads}")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.num_attention_heads: {self.num_attention_heads} does not divide hidden_size {self.hidden_size}; set model.head_dim"
            )
        if self.whole_heads and self.hidden_size % self.num_attention_heads:
            heads = f"{self.num_attention_heads} does not divide hidden_size {self.hidden_size}"
            raise UserError(f"model.num_attention_heads: {heads}, which transformers refuses in this architecture")
        if self.head_size % 2:
            raise UserError(f"model.head_dim: {self.head_size} is odd; rotary embedding turns pairs")
        scaling = self.rope_scaling
        if scaling is not None and (self.rope_theta <= 1 or self.head_size < 4):
            raise UserError("model.rope_scaling: needs model.rope_theta above 1 and heads of 4 dimensions or more")
        if scaling is not None and scaling.needs_context and self.max_position_embeddings is None:
            raise UserError(f"model.rope_scaling: rope_type {scaling.rope_type} needs model.max_position_embeddings; set it")

    @property
    def kv_heads(self) -> int:
        """Key and value heads, the default filled in."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        """Dimensions per head, the default filled in."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def window(self, layer: int) -> int | None:
        """How far back block ``layer`` sees; None for all."""
        return None

    def rope(self, layer: int) -> Rope:
        """The rotary embedding of block ``layer``."""
        return Rope(self.head_size, self.rope_theta, self.rope_scaling, self.max_position_embeddings)

    def of_blocks(self, blocks: Sequence[int]) -> dict[str, Any]:
        """Fields, with their values, that another configuration of these blocks alone has: what went by their numbers no longer does."""
        fields: dict[str, Any] = {"num_hidden_layers": len(blocks)}
        if hasattr(self, "layer_types"):
            fields["layer_types"] = ["full_attention" if self.window(block) is None else "sliding_attention" for block in blocks]
        return fields

    def attention_shape(self) -> AttentionShape:
        """What the blocks' attention is."""
        return AttentionShape(self.hidden_size, self.num_attention_heads, self.kv_heads, self.head_size, dropout=self.attention_dropout)


def full_windows(layer_types: Sequence[str], window: int | None, layer: int) -> int | None:
    """The window of a block by Hugging Face's ``layer_types``: ``sliding_attention`` or ``full_attention``."""
    return window if layer_types[layer] == "sliding_attention" else None


def check_layer_types(layer_types: Sequence[str] | None, layers: int, window: int | None) -> None:
    """Refuse a list of the wrong length, with unknown words, or with a window nobody gave.

    Raises:
        UserError: what is wrong with model.layer_types.
    """
    if layer_types is None:
        return
    if len(layer_types) != layers:
        raise UserError(f"model.layer_types: {len(layer_types)} entries for {layers} layers")
    for word in layer_types:
        if word not in ("sliding_attention", "full_attention"):
            raise UserError(f"model.layer_types: '{word}' is neither sliding_attention nor full_attention")
    if "sliding_attention" in layer_types and window is None:
        raise UserError("model.layer_types: sliding_attention needs model.sliding_window; set it")
