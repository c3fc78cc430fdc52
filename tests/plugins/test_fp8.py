"""precision fp8: torchao's layers in a model of ours, against torchao applied by hand, and bf16."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conftest import column, fw
from fw.checkpointing.placement import initialise
from fw.errors import UserError
from fw.kinds.offload import OffloadPolicy
from fw.kinds.sharding import StepSpec
from fw.registry import inspection
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.optimizer.adamw import AdamW, AdamWConfig
from fw_plugins.precision.bf16 import BF16, BF16Config
from fw_plugins.precision.float8_linear import AutocastFloat8Linear, Float8Linear, Float8LinearConfig, convert_to_float8_training
from fw_plugins.precision.fp8 import FP8, FP8Config
from fw_plugins.sharding.single import SingleRank

CPU = torch.device("cpu")
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def model(hidden: int = 64) -> Llama:
    made = Llama(LlamaConfig(hidden, 2, 4, 2, intermediate_size=96), 64, 64, SDPAttention(None))
    for name, parameter in made.named_parameters():
        initialise(parameter.data, name, made.init(name), seed=0)
    return made


def ids() -> torch.Tensor:
    return torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))


def loss_of(module: nn.Module) -> torch.Tensor:
    return F.cross_entropy(module(ids()[:, :-1]).flatten(0, 1).float(), ids()[:, 1:].flatten())


def spec(plugin, device_type: str = "cpu", **more) -> StepSpec:
    return StepSpec(plugin.policy(), OffloadPolicy(), AdamW(AdamWConfig()).spec(CPU), device_type=device_type, **more)


def step(plugin) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of a step with ``plugin``."""
    ours = model()
    plugin.convert(ours, CPU)
    stepper = SingleRank(None).stepper(ours, None, spec(plugin))
    with stepper.forward_context():
        loss = loss_of(stepper.module)
    stepper.backward(loss)
    return loss.detach(), {name: p.grad for name, p in ours.named_parameters()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_equals_torchao_applied_by_hand(recipe, monkeypatch):
    """By hand: torchao's conversion, torch's autocast; torchao is told that autocast of a GPU is on, which is what it looks at."""
    theirs = model()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(theirs, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    assert sum(type(m) is Float8Linear for m in theirs.modules()) == 14
    with torch.autocast("cpu", torch.bfloat16), monkeypatch.context() as patched:  # in this order: autocast asks too, and puts back
        patched.setattr(torch, "is_autocast_enabled", lambda *_: True)
        patched.setattr(torch, "get_autocast_gpu_dtype", lambda: torch.bfloat16)
        expected = loss_of(theirs)
    expected.backward()
    loss, grads = step(FP8(FP8Config(recipe=recipe)))
    assert loss.equal(expected.detach())
    assert all(grads[name].equal(p.grad) and p.grad.dtype == torch.float32 for name, p in theirs.named_parameters())


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_is_near_bf16(recipe):
    (loss, grads), (expected, theirs) = step(FP8(FP8Config(recipe=recipe))), step(BF16(BF16Config()))
    assert float(loss) == pytest.approx(float(expected), rel=2e-3) and not loss.equal(expected)
    for name, grad in theirs.items():
        assert float((grads[name] - grad).norm() / grad.norm()) < 0.12, name


def test_what_backward_keeps_under_the_cpus_autocast_is_in_16_bits():
    """torchao's own layer asks for the autocast of a GPU only, and keeps its input in fp32: why ours derives from it."""
    linear = nn.Linear(32, 32, bias=False)
    config = dataclasses.replace(Float8LinearConfig(), emulate=True)

    def kept(layer: nn.Module) -> torch.dtype:
        x = torch.randn(16, 32)
        with torch.autocast("cpu", torch.bfloat16):
            return _saved_input(layer, x)

    assert kept(convert_to_float8_training(copy.deepcopy(linear), config=config)) == torch.float32
    ours = nn.ModuleDict({"one": copy.deepcopy(linear)})
    FP8(FP8Config()).convert(ours, CPU)
    assert kept(ours["one"]) == torch.bfloat16


def _saved_input(layer: nn.Module, x: torch.Tensor) -> torch.dtype:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    return next(t.dtype for t in saved if t.shape == x.shape)


def test_layers_stay_the_same_objects_and_keep_their_hooks():
    ours = model()
    before = {name: (module, dict(module.named_parameters(recurse=False))) for name, module in ours.named_modules()}
    seen = []
    ours.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append("hook"))
    FP8(FP8Config()).convert(ours, CPU)
    after = dict(ours.named_modules())
    assert before.keys() == after.keys() and all(after[name] is module for name, (module, _) in before.items())
    assert all(p is dict(after[name].named_parameters(recurse=False))[key] for name, (_, ps) in before.items() for key, p in ps.items())
    loss_of(ours)
    assert seen == ["hook"]


def test_which_layers_are_converted_is_said(capfd):
    def converted(plugin, made) -> set[str]:
        plugin.convert(made, CPU)
        return {name for name, m in made.named_modules() if type(m) is AutocastFloat8Linear}

    assert "lm_head" not in converted(FP8(FP8Config()), model())
    assert (
        "14 of 15 linear layers compute in float8 (tensorwise), emulated, which this device has no products for: slower than bf16, and"
        " nothing is saved" in capfd.readouterr().err
    )
    found = converted(FP8(FP8Config(skip=["*.mlp.*"], emulate=True)), model())
    assert "lm_head" in found and not any("mlp" in name for name in found)
    assert "9 of 15 linear layers compute in float8 (tensorwise), emulated, as asked for" in capfd.readouterr().err
    found = converted(FP8(FP8Config()), model(hidden=96))  # keys and values: 48 rows; a head has 24
    assert "layers.0.self_attn.k_proj" in found
    odd = nn.ModuleDict({"odd": nn.Linear(40, 32), "even": nn.Linear(32, 16)})
    assert converted(FP8(FP8Config()), odd) == {"even"}


@pytest.mark.parametrize(
    ("config", "device", "said"),
    [
        ({"skip": ["*.attn.*"]}, "cpu", r"precision.skip: '\*.attn.\*' is no linear layer of the model; there are \*.q_proj"),
        ({"skip": ["*"]}, "cpu", "precision.skip: none of the model's 15 linear layers is left to compute in float8"),
        (
            {"emulate": False},
            "cpu",
            "precision.emulate: false, but float8 products by recipe tensorwise need a GPU of compute capability 8.9",
        ),
        ({"emulate": False, "recipe": "rowwise"}, "cuda", "need a GPU of compute capability 9.0 or later"),
        ({}, "cuda", "precision.recipe: tensorwise multiplies over the tokens of a micro-batch .* and 34 is no multiple of 16"),
    ],
)
def test_what_cannot_be_is_refused(config, device, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    plugin = FP8(FP8Config(**config))
    with pytest.raises(UserError, match=said):
        plugin.check(model(), {}, spec(plugin, device, micro_batch_size=2), 17)


def test_where_adapters_change_every_layer_nothing_is_left(workspace):
    refused = fw("train", "tiny.yaml", "precision=fp8", "peft={name: lora, targets: [all-linear, lm_head]}")
    assert refused.code == 2 and "peft changes all of this model's, whose products stay in bfloat16" in refused.err


def test_gradients_of_weights_in_bf16_take_any_number_of_tokens(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    plugin = FP8(FP8Config(recipe="rowwise_with_gw_hp"))
    plugin.check(model(), {}, spec(plugin, "cuda", micro_batch_size=2), 17)


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(inspection, "find_spec", lambda name: None)
    assert inspection.missing_packages(FP8.packages) == 'needs torchao, which is not installed: pip install "fw[fp8]"'


@pytest.mark.slow
def test_checkpoints_pass_to_bf16_and_back(workspace):
    words = ["train.max_steps=6", "train.save_every=3", "launch.threads=1"]
    fw("train", "tiny.yaml", "precision=fp8", *words, "train.run_dir=eight").ok()
    fw("train", "tiny.yaml", "precision=bf16", *words, "train.run_dir=sixteen").ok()
    at_3 = "checkpoints/step-00000003"
    for precision, begun in (("bf16", "eight"), ("fp8", "sixteen"), ("fp8", "eight")):
        fw("train", "tiny.yaml", f"precision={precision}", *words, f"resume={begun}/{at_3}", f"train.run_dir={precision}-{begun}").ok()
    assert column("fp8-eight", "loss") == column("eight", "loss")[3:]
    for run, expected in (("bf16-eight", "eight"), ("fp8-sixteen", "sixteen")):
        assert column(run, "loss") == pytest.approx(column(expected, "loss")[3:], rel=2e-3)
    eight, sixteen = (held(Path(run) / at_3) for run in ("eight", "sixteen"))
    assert eight == sixteen and len(eight) > 21 and set(eight.values()) == {"F32"}


def held(directory: Path) -> dict[str, str]:
    """Names and dtypes of all tensors in a checkpoint."""
    found = {}
    for file in directory.rglob("*.safetensors"):
        header = file.read_bytes()
        tensors = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
        found |= {f"{file.relative_to(directory)}: {name}": entry["dtype"] for name, entry in tensors.items() if name != "__metadata__"}
    return found
