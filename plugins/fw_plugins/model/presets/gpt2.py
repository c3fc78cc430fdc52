"""GPT-2 in its published shapes."""

from __future__ import annotations

from fw_models.gpt2 import GPT2Config
from fw_plugins.model.gpt2 import PUBLISHED, GPT2Model
from fw_plugins.model.reference import preset


class GPT2Medium(GPT2Model):
    """GPT-2 355M (https://huggingface.co/openai-community/gpt2-medium)."""

    Config = preset(GPT2Config, **PUBLISHED, n_embd=1024, n_layer=24, n_head=16)


class GPT2Large(GPT2Model):
    """GPT-2 774M (https://huggingface.co/openai-community/gpt2-large)."""

    Config = preset(GPT2Config, **PUBLISHED, n_embd=1280, n_layer=36, n_head=20)


class GPT2XL(GPT2Model):
    """GPT-2 1.6B (https://huggingface.co/openai-community/gpt2-xl)."""

    Config = preset(GPT2Config, **PUBLISHED, n_embd=1600, n_layer=48, n_head=25)
