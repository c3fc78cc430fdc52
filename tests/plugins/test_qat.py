"""Weights that train for the codes they will be: against what those codes compute, and gradients by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fw
from conftest import column, fw as run_fw
from fw.kinds import make
from fw.kinds.quantization import QuantizationPlugin
from fw_plugins.quantization.grouped import Grouped

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(1))
OPTIONS = [{"bits": 4, "group_size": 16}, {"bits": 4, "group_size": -1, "symmetric": False}, {"bits": 8, "group_size": 8}]
QAT = "quantization={name: qat, group_size: 32}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=False)
    model = transformers.Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("options", OPTIONS, ids=json.dumps)
def test_a_model_computes_what_its_codes_will(base: Path, options: dict[str, object]) -> None:
    ours = fw.load_model(base, quantization=make(QuantizationPlugin, "qat", **options))
    others = {key: value for key, value in options.items() if key != "bits"}
    coded = fw.load_model(base, quantization=make(QuantizationPlugin, f"w{options['bits']}a16", **others))
    with torch.no_grad():
        found, expected, plain = ours(IDS), coded(IDS), fw.load_model(base)(IDS)
    assert (found - expected).abs().max() < 1e-6 < (found - plain).abs().max()


class _Rounded(nn.Module):
    """Of the nearest whole number of steps, as the docstring of w4a16 has it; its gradient as if nothing was rounded."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def forward(self, weight_OI: Tensor) -> Tensor:
        weight_OGn = weight_OI.unflatten(1, (-1, self.group))
        scale = weight_OGn.abs().amax(-1, keepdim=True) / 7.5
        rounded = ((weight_OGn / scale).round().clamp(-8, 7) * scale).flatten(1)
        return weight_OI + (rounded - weight_OI).detach()


def test_gradients_are_those_by_hand(base: Path) -> None:
    ours = fw.load_model(base, quantization=make(QuantizationPlugin, "qat", group_size=16)).train()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).train()
    for name, module in list(theirs.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parametrize.register_parametrization(module, "weight", _Rounded(16), unsafe=True)
    for logits in (ours(IDS), theirs(IDS).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    wanted = {name.replace("parametrizations.weight.original", "weight"): p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        (of,) = ours.hf_tensors(name)
        assert parameter.requires_grad and (parameter.grad - wanted[of.name]).abs().max() < 1e-5 * wanted[of.name].abs().max(), name


def test_the_head_and_what_is_skipped_stay_as_they_are(base: Path) -> None:
    model = fw.load_model(base, quantization=make(QuantizationPlugin, "qat", group_size=16, skip=["*lm_head", "layers.0.*"]))
    layouts = {name: getattr(module, "layout", None) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert layouts["layers.1.mlp.up_proj"] == Grouped((48, 32), 4, 16, True)
    assert {name for name, layout in layouts.items() if layout is None} == {"lm_head", *(n for n in layouts if n.startswith("layers.0."))}


def test_a_trained_model_becomes_the_codes_it_was_trained_for(workspace: Path) -> None:
    """Every sharding trains the same; the directory that `fw quantize` makes computes what the run's validation did."""
    words = ["tiny.yaml", QAT, "train.max_steps=3", "train.save_every=3", "train.val_every=3"]
    run_fw("train", *words).ok()
    for name, sharding in {"ddp": "ddp", "fsdp": "fsdp", "two": "{name: zero, stage: 2}", "three": "{name: zero, stage: 3}"}.items():
        if "zero" in sharding:
            pytest.importorskip("deepspeed")
        run_fw("train", *words, f"sharding={sharding}", "launch.devices=2", f"train.run_dir={name}", "activation=full").ok()
        # Weights between two codes go either way by what sums of two ranks leave over: from the second step on gradients differ by that.
        assert column(name, "grad_norm")[0] == pytest.approx(column("run", "grad_norm")[0], rel=1e-6), name
        for figure, rel in {"loss": 1e-4, "grad_norm": 2e-3}.items():
            assert column(name, figure) == pytest.approx(column("run", figure), rel=rel), (name, figure)
    run_fw("quantize", "run", "--to", "coded", "--method", "rtn", "--group-size", "32").ok()
    ours = fw.load_model("run", quantization=make(QuantizationPlugin, "qat", group_size=32))
    ids = IDS % 256
    with torch.no_grad():
        assert (fw.load_model("coded")(ids) - ours(ids)).abs().max() < 1e-5
    assert json.loads(Path("coded/config.json").read_text())["quantization_config"]["quant_method"] == "compressed-tensors"


def test_memory_is_planned(workspace: Path) -> None:
    words = ["tiny.yaml", QAT, "precision=bf16"]
    planned, measured = (
        json.loads(run_fw(verb, *words, "--json", *more).ok().out)["per_rank"][0] for verb, *more in (["plan"], ["profile", "--timed", "0"])
    )
    for key in ("parameters_bytes", "gradients_bytes", "optimizer_bytes"):
        assert planned["components_max"][key] == measured["components_max"][key]
    assert planned["allocated_peak_bytes"] == pytest.approx(measured["allocated_peak_bytes"], abs=2048)


def test_what_cannot_be_is_refused(workspace: Path) -> None:
    def refused(*words: str) -> str:
        found = run_fw("train", "tiny.yaml", *words)
        assert found.code == 2 and "Traceback" not in found.err, found.err
        return found.err.splitlines()[-1]

    assert "qat trains the weights that are rounded" in refused(QAT, "peft=lora")
    assert "a group of weights that shares a scale would be cut" in refused(QAT, "sharding={name: fsdp, tensor: 2}", "launch.devices=2")
    assert "quantization.group_size: 48 does not divide the 64 features" in refused("quantization={name: qat, group_size: 48}")
    assert "quantization.bits" in refused("quantization={name: qat, bits: 3}")
