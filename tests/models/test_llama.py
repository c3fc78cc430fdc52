"""What training relies on beside the numbers that test_hf_parity compares: initial weights, FLOPs, weight decay."""

from __future__ import annotations

import pytest
import torch

from fw.checkpointing.placement import initialise
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.eager import EagerAttention
from fw_plugins.attention.sdpa import SDPAttention

SHAPES = [
    LlamaConfig(64, 2, 4, 2, intermediate_size=96, vocab_size=101),
]


def build(config: LlamaConfig, attention=SDPAttention) -> Llama:
    model = Llama(config, config.vocab_size, 64, attention(None))
    for name, parameter in model.named_parameters():
        initialise(parameter.data, name, model.init(name), seed=1)
        if "norm" in name:  # all ones would hide a norm that is skipped
            parameter.data += torch.linspace(-0.5, 0.5, parameter.numel())
    return model


def test_positions_move_the_rotation():
    model = build(SHAPES[0])
    ids = torch.arange(16)[None]
    shifted = model(ids, positions_BL=torch.arange(5, 21)[None])
    torch.testing.assert_close(shifted, model(ids), atol=1e-5, rtol=1e-4)  # rotary attention sees distances only
    spread = model(ids, positions_BL=2 * torch.arange(16)[None])
    assert (spread - model(ids)).abs().max() > 1e-3


def test_initial_weights_have_the_stated_spread():
    model = build(LlamaConfig(256, 2, 4, intermediate_size=512, vocab_size=1000))
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.layers[1].mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.layers[1].mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 2, rel=0.02)  # sqrt(2 · 2 layers)


def test_flops_count_the_matrix_products():
    """Against torch's own counter: 2 per multiply-add, the whole attention square."""
    from torch.utils.flop_counter import FlopCounterMode

    config = LlamaConfig(64, 2, 4, 2, intermediate_size=96, vocab_size=101)
    model = build(config, EagerAttention)
    ids = torch.zeros(3, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert model.flops_per_token(32) * ids.numel() == counter.get_total_flops()


def test_weight_decay_leaves_norms_and_embedding_alone():
    model = build(SHAPES[0])
    decayed = {name for name, _ in model.named_parameters()} - model.undecayed()
    assert all(name.endswith("proj.weight") or name == "lm_head.weight" for name in decayed)
    assert len(decayed) == 2 * 7 + 1
