"""4-bit weights against bitsandbytes' own layers and transformers' models of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import fw
from fw.cli import main
from fw.kinds import make
from fw.kinds.quantization import QuantizationPlugin

bitsandbytes = pytest.importorskip("bitsandbytes")
transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = transformers.LlamaConfig(
    vocab_size=40, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


class _Alone(nn.Module):
    """A model of one layer."""

    def __init__(self, out: int, into: int, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(into, out, bias=bias)


def layer(name: str, values: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, **options: object) -> nn.Module:
    with torch.device("meta"):
        model = _Alone(*values.shape, bias is not None).to(dtype)
        (weight,) = make(QuantizationPlugin, name, **options).apply(model, dtype).values()
    model.to_empty(device="cpu")
    for key, value in weight.quantize(values.to(dtype)).items():
        model.get_parameter(key).data.copy_(value)
    if bias is not None:
        model.layer.bias.data.copy_(bias)
    return model.layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind, block", [("nf4", 64), ("fp4", 64), ("nf4", 256)])
@pytest.mark.parametrize("shape", [(96, 128), (48, 72), (700, 512)])
def test_a_layer_keeps_and_computes_what_bitsandbytes_does(shape, kind, block, double, dtype):
    chance = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=chance) * torch.rand(shape[0], 1, generator=chance)
    bias = torch.randn(shape[0], generator=chance)
    ours = layer(kind, values, bias, dtype, block_size=block, double_quantization=double)
    theirs = bitsandbytes.nn.Linear4bit(shape[1], shape[0], compute_dtype=dtype, compress_statistics=double, quant_type=kind)
    theirs.weight = bitsandbytes.nn.Params4bit(
        values.to(dtype), requires_grad=False, blocksize=block, compress_statistics=double, quant_type=kind
    )
    theirs.bias = nn.Parameter(bias.to(dtype))
    theirs = theirs.to("cpu")
    state = theirs.weight.quant_state
    assert torch.equal(ours.weight.flatten(), theirs.weight.flatten())
    if double:
        assert torch.equal(ours.weight_absmax, state.absmax)
        assert torch.equal(ours.weight_nested.view(torch.float32), state.state2.absmax)
        assert torch.equal(ours.weight_offset.view(torch.float32), state.offset.view(1))
    else:
        assert torch.equal(ours.weight_absmax.view(torch.float32), state.absmax)
    dense = bitsandbytes.functional.dequantize_4bit(theirs.weight, state)
    assert torch.equal(ours.dense_weight(dtype), dense)
    x = torch.randn(3, 5, shape[1], generator=chance, dtype=dtype)
    upstream = torch.randn(3, 5, shape[0], generator=chance, dtype=dtype)
    found = []
    for module in (ours, theirs):
        own = x.clone().requires_grad_()
        out = module(own)
        out.backward(upstream)
        found.append((out.detach(), own.grad))
    for one, other in zip(*found, strict=True):
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        assert (one - other).abs().max() <= tolerance * other.abs().max()


COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize(
    "seen, computed, autocast",
    [("bf16", "fp32", False), ("bf16", "fp32", True), ("bf16", "fp16", False), ("bf16", "fp16", True), ("fp32", "bf16", False)],
)
def test_products_are_of_the_dtype_that_is_asked_for(seen, computed, autocast):
    """Those of plain weights in that dtype, and of bitsandbytes; what a layer is given and gives has the dtype of activations."""
    chance = torch.Generator().manual_seed(0)
    values, bias = torch.randn(96, 128, generator=chance), torch.randn(96, generator=chance)
    dtype, compute = COMPUTE[seen], COMPUTE[computed]
    ours = layer("nf4", values, bias, torch.float32, compute_dtype=computed)
    theirs = bitsandbytes.nn.Linear4bit(128, 96, compute_dtype=compute, quant_type="nf4")
    theirs.weight = bitsandbytes.nn.Params4bit(values, requires_grad=False, quant_type="nf4")
    theirs.bias = nn.Parameter(bias.clone())
    theirs = theirs.to("cpu")
    x, upstream = (torch.randn(3, 5, size, generator=chance).to(dtype) for size in (128, 96))
    dense = ours.dense_weight(compute)
    assert torch.equal(dense, bitsandbytes.functional.dequantize_4bit(theirs.weight, theirs.weight.quant_state).to(compute))
    given = x.float() if autocast else x.clone()
    given.requires_grad_()
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = ours(given)
    out.backward(upstream)
    grad = given.grad.to(dtype)
    assert out.dtype == dtype
    assert torch.equal(out, (torch.nn.functional.linear(x.to(compute), dense) + bias.to(compute)).to(dtype))
    assert torch.equal(grad, (upstream.to(compute) @ dense).to(dtype))
    own = x.clone().requires_grad_()
    expected = theirs(own)
    expected.backward(upstream)
    for one, other in ((out, expected.detach()), (grad, own.grad)):
        assert (one - other).abs().max() <= 1e-2 * other.abs().max()
    auto = layer("nf4", values, bias, torch.float32)
    assert not torch.equal(auto(x), out), "the option does something"
    assert torch.equal(layer("nf4", values, bias, torch.float32, compute_dtype=seen)(x), auto(x))


def test_a_model_computes_in_the_dtype_asked_for(workspace: Path, base: Path) -> None:
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu")
    ours = fw.load_model(base, dtype=torch.bfloat16, quantization=make(QuantizationPlugin, "nf4", compute_dtype="fp32"))
    with torch.no_grad():
        expected, found = theirs(IDS).logits.float(), ours(IDS).float()
    assert (found - expected).norm() <= 1e-2 * expected.norm()
    assert all(module.grouped_codes() is None for module in ours.modules() if hasattr(module, "grouped_codes"))
    written = json.loads((fw.save_model(ours, workspace / "made") / "config.json").read_text())["quantization_config"]
    assert transformers.BitsAndBytesConfig.from_dict(written).bnb_4bit_compute_dtype == torch.float32


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_logits_are_those_of_transformers(base: Path, kind: str) -> None:
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu")
    ours = fw.load_model(base, dtype=torch.bfloat16, quantization=kind)
    plain = fw.load_model(base, dtype=torch.bfloat16)
    for name, weight in ours.quantized.items():  # before bitsandbytes packs them anew for a forward on the CPU
        (of,) = ours.hf_tensors(name)
        assert torch.equal(ours.get_parameter(name).flatten(), theirs.get_parameter(of.name).flatten()), name
        assert sum(ours.get_parameter(part).nbytes for part in weight.kept) <= 0.27 * 2 * weight.shape[0] * weight.shape[1]
    with torch.no_grad():
        expected, found, unquantized = theirs(IDS).logits, ours(IDS), plain(IDS)
    assert (found - expected).norm() <= 1e-2 * expected.norm()
    assert (found - unquantized).norm() > 5e-2 * expected.norm()


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["quantization=nf4"], "peft"),
        (["quantization=nf4", "peft=dora"], "norms"),
        (["quantization={name: nf4, block_size: 63}", "peft=lora"], "block_size"),
        (["quantization={name: nf4, skip: ['*']}", "peft=lora"], "skip"),
        (["quantization=nf4", "peft=lora", "sharding={name: fsdp, tensor: 2}", "launch.devices=2"], "tensor"),
        (["quantization=nf4", "peft=lora", "sharding={name: zero, stage: 3}", "launch.devices=2"], "stage"),
    ],
)
def test_what_does_not_go_together_is_refused(
    workspace: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], words: str
) -> None:
    assert main(["train", "tiny.yaml", *overrides]) == 2
    assert words in capsys.readouterr().err
