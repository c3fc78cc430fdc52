"""A Llama of 336 M parameters that has learnt nothing, and words for its tokens; written without a model in memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from fw.tokenizer import Tokenizer

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY, CONTEXT = 24, 1024, 2816, 16, 4, 32_000, 2048


def make(directory: Path) -> int:
    """A Llama of random weights, with a tokenizer; bytes of the weights that a step reads."""
    torch.manual_seed(0)
    size = HIDDEN // HEADS
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for n in range(LAYERS):
        block = f"model.layers.{n}."
        shapes |= {
            f"{block}self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{block}self_attn.k_proj.weight": (KV_HEADS * size, HIDDEN),
            f"{block}self_attn.v_proj.weight": (KV_HEADS * size, HIDDEN),
            f"{block}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{block}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{block}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{block}mlp.down_proj.weight": (HIDDEN, INNER),
        }
    tensors = {name: (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    names = [f"model.layers.{n}.{norm}.weight" for n in range(LAYERS) for norm in ("input_layernorm", "post_attention_layernorm")]
    tensors |= {name: torch.ones(HIDDEN, dtype=torch.bfloat16) for name in [*names, "model.norm.weight"]}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, VOCABULARY)}}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer.from_backend(backend, bos_token="<s>", eos_token="</s>").save(directory)
    return sum(tensor.nbytes for name, tensor in tensors.items() if "embed_tokens" not in name)
