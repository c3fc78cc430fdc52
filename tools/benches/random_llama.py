"""A Llama that has learnt nothing, of 336 M parameters or another shape, and words for its tokens; written without a model in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend, models, pre_tokenizers

from fw.tokenizer import Tokenizer

VOCABULARY, CONTEXT = 32_000, 2048


@dataclass(frozen=True)
class Shape:
    """Sizes by their names in a Llama's config."""

    layers: int = 24
    hidden: int = 1024
    inner: int = 2816
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = VOCABULARY


def make(directory: Path, shape: Shape | None = None) -> int:
    """A Llama of random weights, with a tokenizer; bytes of the weights that a step reads."""
    torch.manual_seed(0)
    sizes = shape or Shape()
    hidden, inner, vocabulary, size = sizes.hidden, sizes.inner, sizes.vocabulary, sizes.hidden // sizes.heads
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for n in range(sizes.layers):
        block = f"model.layers.{n}."
        shapes |= {
            f"{block}self_attn.q_proj.weight": (hidden, hidden),
            f"{block}self_attn.k_proj.weight": (sizes.kv_heads * size, hidden),
            f"{block}self_attn.v_proj.weight": (sizes.kv_heads * size, hidden),
            f"{block}self_attn.o_proj.weight": (hidden, hidden),
            f"{block}mlp.gate_proj.weight": (inner, hidden),
            f"{block}mlp.up_proj.weight": (inner, hidden),
            f"{block}mlp.down_proj.weight": (hidden, inner),
        }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {name: (torch.randn(shape, device=device) * 0.02).bfloat16().cpu() for name, shape in shapes.items()}
    names = [f"model.layers.{n}.{norm}.weight" for n in range(sizes.layers) for norm in ("input_layernorm", "post_attention_layernorm")]
    tensors |= {name: torch.ones(hidden, dtype=torch.bfloat16) for name in [*names, "model.norm.weight"]}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
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
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, vocabulary)}}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Tokenizer.from_backend(backend, bos_token="<s>", eos_token="</s>").save(directory)
    return sum(tensor.nbytes for name, tensor in tensors.items() if "embed_tokens" not in name)
