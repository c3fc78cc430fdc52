"""Rescaled blocks compute what they did, and are rounded better where some inputs are much larger than others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fw
from fw.pretrained.awq import rescale
from fw_plugins.quantization.grouped import Grouped

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(1))
SHAPE = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": (transformers.LlamaConfig(**SHAPE, num_key_value_heads=4, attention_bias=True, mlp_bias=True), 14),
    "grouped queries": (transformers.LlamaConfig(**SHAPE, num_key_value_heads=2), 12),
    "gemma3": (transformers.Gemma3TextConfig(**SHAPE, num_key_value_heads=2, head_dim=16, sliding_window=8, pad_token_id=0), 12),
    "mixtral": (transformers.MixtralConfig(**SHAPE, num_key_value_heads=4, num_local_experts=4), 8),
}


def made(name: str, place: Path):
    """With some features much larger than others, as large models have them, and biases."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name][0])
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            parameter.data.normal_(std=0.1)
        elif parameter.dim() == 1:
            parameter.data[::17] += 8
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(place)
    return fw.load_model(place)


def seen(model, block: int) -> dict[str, Tensor]:
    """Σ x xᵀ of the block's linear layers, by the names of their weights."""
    found: dict[str, Tensor] = {}
    handles = []
    for name, module in model.blocks[block].named_modules():
        if isinstance(module, torch.nn.Linear) and not name.endswith(".gate"):

            def see(module, args, name=f"layers.{block}.{name}.weight"):
                x = args[0].flatten(0, -2)
                found[name] = x.t() @ x

            handles.append(module.register_forward_pre_hook(see))
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    return found


def rounded(name: str, weight: Tensor) -> Tensor:
    layout = Grouped((weight.shape[0], weight.shape[1]), 4, 16, True)
    return layout.dequantize(tuple(layout.quantize(weight).values()), weight.dtype)


def error(model) -> float:
    """Σ ‖(Ŵ - W) x‖² over the first block's layers."""
    total = 0.0
    for name, gram in seen(model, 0).items():
        change = rounded(name, model.get_parameter(name).detach()) - model.get_parameter(name).detach()
        total += float(((change @ gram) * change).sum())
    return total


@pytest.mark.parametrize("name", MODELS)
def test_the_model_computes_the_same_and_is_rounded_better(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    with torch.no_grad():
        expected = model(IDS)
    grams = seen(model, 0)
    before = error(model)
    weights = {key: model.get_parameter(key).detach().clone() for key in grams}
    for block in range(2):
        rescale(model.blocks[block], f"layers.{block}", model.rescalings(block), seen(model, block), rounded)
    changed = sum(len(each.layers) for block in range(2) for each in model.rescalings(block))
    assert changed == MODELS[name][1]
    assert sum(not torch.equal(model.get_parameter(key), weight) for key, weight in weights.items()) >= 3
    with torch.no_grad():
        assert (model(IDS) - expected).abs().max() < 1e-4 * expected.abs().max()
    assert error(model) < 0.8 * before


def test_what_is_not_rounded_is_left_alone(tmp_path: Path) -> None:
    model = made("llama", tmp_path)
    grams = {name: gram for name, gram in seen(model, 0).items() if "v_proj" not in name}
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rescale(model.blocks[0], "layers.0", model.rescalings(0), grams, rounded)
    for name in ("q_proj", "k_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        assert torch.equal(model.get_parameter(key), before[key]), "one norm makes the input of all three"
    assert not torch.equal(model.get_parameter("layers.0.mlp.up_proj.weight"), before["layers.0.mlp.up_proj.weight"])
