"""Llama's parameter names here and in transformers' ``LlamaForCausalLM``: the same but for a prefix."""

from __future__ import annotations


def to_hf(name: str) -> str:
    """``layers.0.mlp.up_proj.weight`` → ``model.layers.0.mlp.up_proj.weight``; the head stands outside ``model``."""
    return name if name.startswith("lm_head.") else f"model.{name}"
