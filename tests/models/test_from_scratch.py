"""Every architecture from initial weights, most fields left at their defaults: what it writes is what transformers runs."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import fw
from fw.checkpointing.placement import initialise
from fw.kinds import make
from fw.kinds.model import ModelPlugin
from fw_plugins.attention.sdpa import SDPAttention

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ARCHITECTURES = {
    "llama": SMALL,
    "mistral": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL,
    "gemma2": SMALL,
    "gemma3": SMALL,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "mixtral": SMALL,
    "qwen3_moe": {**SMALL, "num_experts": 8, "moe_intermediate_size": 16},
}


def build(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        model = make(ModelPlugin, name, **ARCHITECTURES[name]).build(77, 48, SDPAttention(None))
    model.materialise(torch.device("cpu"))
    for parameter, tensor in model.stored().items():
        initialise(tensor.data, parameter, model.init(parameter), seed=0)
    return model.eval()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_transformers_runs_it(name, tmp_path):
    model = build(name)
    fw.save_model(model, tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-5, rtol=0)
    assert theirs.config.get_text_config().max_position_embeddings == (64 if name == "gpt2" else 48)
    loss = torch.nn.functional.cross_entropy(model(ids)[0], ids[0])
    assert 3.5 < loss < 5.5, "about log(77) before anything is learnt"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_norms_and_biases_are_not_decayed_and_nothing_is_forgotten(name):
    model = build(name)
    undecayed = model.undecayed()
    for parameter, tensor in model.named_parameters():
        assert (parameter in undecayed) == (tensor.dim() < 2 or "embed" in parameter or parameter.startswith(("wte", "wpe"))), parameter
        neutral = 0.0 if parameter.endswith("bias") or "gemma" in name else 1.0
        assert tensor.dim() > 1 or bool((tensor == neutral).all()), parameter
        assert tensor.dim() < 2 or 0.002 < tensor.std() < 0.03, parameter


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_compiled_blocks_compute_the_same(name):
    model, ids = build(name).train(), torch.arange(40)[None]
    plain = model(ids)
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(model(ids), plain, atol=1e-5, rtol=0)


def test_gpt2_drops_in_training_only():
    published = make(ModelPlugin, "gpt2").config
    assert (published.embd_pdrop, published.attn_pdrop, published.resid_pdrop) == (0.1, 0.1, 0.1)
    model, ids = build("gpt2"), torch.arange(40)[None]
    expected = model(ids)
    for field in ("embd_pdrop", "attn_pdrop", "resid_pdrop"):
        setattr(model.config, field, 0.5)
        for block in model.blocks:
            block.attn.dropout, block.attn.out_dropout, block.mlp.dropout = model.config.attn_pdrop, *[model.config.resid_pdrop] * 2
        assert torch.equal(model.eval()(ids), expected)
        torch.manual_seed(0)
        assert not torch.allclose(model.train()(ids), expected, atol=1e-4), field
        setattr(model.config, field, 0.0)
