"""GPT-2, by default in its smallest published shape."""

from __future__ import annotations

from fw_models.gpt2 import GPT2, GPT2Config
from fw_plugins.model.reference import ReferenceModel, preset

PUBLISHED = {"vocab_size": 50257, "n_positions": 1024, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1}


class GPT2Model(ReferenceModel):
    """GPT-2 124M, or of any shape: learnt positions, LayerNorm, GELU (https://huggingface.co/openai-community/gpt2)."""

    api = 1
    hf_model_types = ("gpt2",)
    Config = preset(GPT2Config, **PUBLISHED)
    architecture = GPT2
