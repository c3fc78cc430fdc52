"""Every architecture and each of its variations: the configuration of a tiny model, for transformers to make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 131

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def _llama(**more: Any) -> dict[str, Any]:
    return {"model_type": "llama", **_SHAPE, **more}


_GEMMA = {**_SHAPE, "head_dim": 16, "num_hidden_layers": 7, "query_pre_attn_scalar": 20, "sliding_window": 9}
_MIXTRAL = {"model_type": "mixtral", **_SHAPE, "num_local_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    **_SHAPE,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.05,
}
_GPT2 = {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}

CASES: dict[str, dict[str, Any]] = {
    "llama": _llama(),
    "llama-mha-tied": _llama(num_key_value_heads=4, tie_word_embeddings=True),
    "llama-biases-head_dim": _llama(attention_bias=True, mlp_bias=True, head_dim=20, num_key_value_heads=1),
    "llama-theta": _llama(**_rope(rope_type="default", rope_theta=500000.0), rms_norm_eps=1e-3),
    "llama-linear": _llama(**_rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": _llama(**_rope(rope_type="dynamic", factor=2.0), max_position_embeddings=16),
    "llama-yarn": _llama(**_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-yarn-mscale": _llama(
        **_rope(
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            mscale=0.7,
            mscale_all_dim=0.4,
            beta_fast=20.0,
            beta_slow=2.0,
            truncate=False,
        )
    ),
    "llama-yarn-attention_factor": _llama(**_rope(rope_type="yarn", factor=2.0, attention_factor=1.3)),
    "llama-llama3": _llama(
        **_rope(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
    ),
    "mistral": {"model_type": "mistral", **_SHAPE, "sliding_window": None},
    "mistral-window": {"model_type": "mistral", **_SHAPE, "sliding_window": 7, "head_dim": 10},
    "qwen2": {"model_type": "qwen2", **_SHAPE},
    "qwen2-windows-tied": {
        "model_type": "qwen2",
        **_SHAPE,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", **_SHAPE, "head_dim": 20},
    "qwen3-layer_types": {
        "model_type": "qwen3",
        **_SHAPE,
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma2": {"model_type": "gemma2", **_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma2-uncapped": {"model_type": "gemma2", **_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": {"model_type": "gemma3_text", **_GEMMA},
    "gemma3-stretched": {
        "model_type": "gemma3_text",
        **_GEMMA,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        "layer_types": ["full_attention", *["sliding_attention"] * 2, *["full_attention"] * 4],
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": False,
    },
    "gpt2": _GPT2,
    "gpt2-variant": {
        **_GPT2,
        "n_inner": 100,
        "activation_function": "relu",
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "mixtral": _MIXTRAL,
    "mixtral-window": {**_MIXTRAL, "sliding_window": 7, "num_experts_per_tok": 1, "router_aux_loss_coef": 0.1},
    "qwen3_moe": {**_QWEN3_MOE, "norm_topk_prob": True},
    "qwen3_moe-mixed": {**_QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False},
}


def make(case: str) -> PreTrainedModel:
    """transformers' model of a case, every parameter random (norms and biases too, so that none can be left out unseen)."""
    settings = dict(CASES[case])
    # Dropout off, so that training mode can be compared.
    settings |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0} if settings["model_type"] == "gpt2" else {}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            centre = 1.0 if ("norm" in name or ".ln_" in name) and name.endswith("weight") and "gemma" not in case else 0.0
            parameter.copy_(centre + (0.2 if parameter.dim() < 2 else 0.1) * noise)
    return model.eval()


def save(case: str, directory: Path, max_shard_size: str = "5GB") -> PreTrainedModel:
    """The model, and its directory as transformers writes it."""
    model = make(case)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
