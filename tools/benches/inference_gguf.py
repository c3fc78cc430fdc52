"""A Llama's directory as a file of llama.cpp's, by its own library for these."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _tensors(file: Path) -> dict[str, np.ndarray]:
    """bfloat16 as fp32."""
    with file.open("rb") as raw:
        size = int.from_bytes(raw.read(8), "little")
        header = json.loads(raw.read(size))
    data = np.memmap(file, mode="r", offset=8 + size)
    found = {}
    for name, told in header.items():
        if name != "__metadata__":
            begin, end = told["data_offsets"]
            bits = data[begin:end].view(np.uint16).astype(np.uint32) << 16
            found[name] = bits.view(np.float32).reshape(told["shape"])
    return found


def _turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head in the order in which llama.cpp rotates them: neighbours are pairs."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(model: Path, to: Path, weights: str) -> None:
    """``bf16``, ``q8_0`` or ``q4_0``; norms in fp32."""
    config = json.loads((model / "config.json").read_text())
    kind = gguf.GGMLQuantizationType[weights.upper()]
    writer = gguf.GGUFWriter(str(to), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in _tensors(model / "model.safetensors").items():
        whole = name.removesuffix(".weight")
        if whole.startswith("model.layers."):
            number, inner = whole.removeprefix("model.layers.").split(".", 1)
            new = f"blk.{number}.{_NAMES[inner]}.weight"
            if inner in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = _turned(weight, config["num_attention_heads" if inner.endswith("q_proj") else "num_key_value_heads"])
        else:
            new = f"{_OUTER[whole]}.weight"
        if weight.ndim == 1:
            writer.add_tensor(new, weight)
        else:
            writer.add_tensor(new, gguf.quants.quantize(np.ascontiguousarray(weight), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
