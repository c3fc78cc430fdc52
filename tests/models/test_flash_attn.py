"""The plugin over flash-attn: what it refuses and when, and what is around it. Its numbers are compared in test_attention.py."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import environment, fw
from fw.errors import UserError
from fw.kinds.attention import Pattern
from fw.kinds.offload import OffloadPolicy
from fw.kinds.optimizer import OptimizerSpec
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw_models.gemma2 import Gemma2, Gemma2Config
from fw_models.gpt2 import GPT2, GPT2Config
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.activation.profiling import profile
from fw_plugins.attention.eager import EagerAttention
from fw_plugins.attention.flash_attn import FlashAttention, FlashAttentionConfig
from models import flash_attn_stand_in as stand_in
from plugins.test_activation import CPU, LENGTH, SPEC, batch, gradients, initialise, plugin

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    stand_in.calls.clear()


def flash() -> FlashAttention:
    return FlashAttention(FlashAttentionConfig())


def spec(device: str = "cuda", compute: torch.dtype = BF16) -> StepSpec:
    return StepSpec(PrecisionPolicy(FP32, compute, FP32), OffloadPolicy(), OptimizerSpec(torch.optim.SGD, 0.1), device_type=device)


def llama(attention=None, **options):
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return Llama(LlamaConfig(**{**shape, **options}), 50, LENGTH, attention or flash())


def on_cpu(model):
    model.materialise(CPU)
    for parameter, tensor in model.named_parameters():
        initialise(tensor.data, parameter, model.init(parameter), 0)
    return model.train()


def test_what_the_kernels_do_not_do_is_refused():
    with torch.device("meta"):
        model = llama()
        wide = llama(head_dim=512)
        capped = Gemma2(Gemma2Config(hidden_size=32, num_hidden_layers=2, attention_dropout=0.1), 50, LENGTH, flash())
    flash().check(model, spec())
    flash().check(model, spec(compute=torch.float16))
    for of, on, says in (
        (model, spec("cpu"), "computes on GPUs only, and this run on the CPU"),
        (model, spec(compute=FP32), r"takes float16 and bfloat16 only, and this run computes in float32 \(precision=bf16 would do\)"),
        (wide, spec(), "takes heads of 256 dimensions at most, and this model's have 512"),
        (capped, spec(), r"drops no weights where scores are capped \(model\.attention_dropout=0 would do\)"),
    ):
        with pytest.raises(UserError, match=rf"^attention\.name: flash_attn {says}; use attention=sdpa$"):
            flash().check(of, on)


def test_a_device_or_package_that_will_not_do_is_refused(monkeypatch):
    with torch.device("meta"):
        model = llama()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(UserError, match=r"needs an Ampere GPU or a newer one, and a T4 has capability 7\.5; use attention=sdpa"):
        flash().check(model, spec())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    flash().check(model, spec())
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(__version__="2.5.9.post1"))
    with pytest.raises(UserError, match=r"flash-attn 2\.5\.9\.post1 is too old"):
        flash().check(model, spec())
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserError, match=r"is installed and does not load \(.*\); build it again for torch"):
        flash().check(model, spec())


def test_the_sentences_of_a_run(workspace: Path):
    done = fw("train", "tiny.yaml", "attention=flash_attn", "precision=bf16")
    assert done.code == 2 and "attention 'flash_attn' needs flash_attn, which is not installed: pip install" in done.err
    assert "or use attention=sdpa" in done.err and "Traceback" not in done.err
    Path("here/flash_attn").mkdir(parents=True)
    Path("here/flash_attn/__init__.py").write_text("raise RuntimeError('imported')\n")
    listed = fw("plugins", "list", "attention", env={**environment(), "PYTHONPATH": "here"}).ok().out
    assert "flash_attn" in listed and "needs" not in next(line for line in listed.splitlines() if "flash_attn" in line)
    done = fw("train", "tiny.yaml", "attention=flash_attn", "precision=bf16", env={**environment(), "PYTHONPATH": "here"})
    assert done.code == 2 and "fw: error: override attention=flash_attn: attention.name: flash_attn computes on GPUs only" in done.err
    assert not Path("run").exists()


def test_documents_become_offsets():
    plan = flash().plan(Pattern(6, 9, torch.tensor([[0, 1, 1, 2, 2, 2], [2, 2, 2, 2, 3, 0]])), CPU)
    assert plan.offsets.tolist() == [0, 1, 3, 6, 10, 11, 12] and plan.longest == 4 and plan.window is None
    assert plan.offsets.dtype == torch.int32
    assert flash().plan(Pattern(6, 6), CPU) == (None, None, 0) and flash().plan(Pattern(6, 5), CPU).window == 5


def test_autocast_decides_the_dtype_that_the_kernels_see():
    q, k, v = (torch.randn(1, heads, 8, 4) for heads in (4, 2, 2))
    made = flash()
    with torch.autocast("cpu", BF16):
        out = made.attend(q, k, v, made.plan(Pattern(8), CPU), scale=0.5)
    assert out.dtype == BF16
    expected = EagerAttention(None).attend(q, k, v, Pattern(8).seen(CPU), scale=0.5)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=0)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("name", ["none", "full", "selective", "sqrt"])
def test_recomputation_knows_the_operator(name, segments):
    """Dropout everywhere: what is kept must leave the generator where the kernel would have."""

    def run(name):
        with torch.device("meta"):
            model = GPT2(
                GPT2Config(n_embd=32, n_layer=3, n_head=4, attn_pdrop=0.2, resid_pdrop=0.2, n_positions=LENGTH), 50, LENGTH, flash()
            )
        options = {"save": ["attention"]} if name == "selective" else {}
        plugin(name, **options).apply(model, SPEC, LENGTH)
        model = on_cpu(model)
        stand_in.calls.clear()
        if not segments:
            return gradients(model), len(stand_in.calls)
        torch.manual_seed(1)
        documents = torch.arange(LENGTH).div(10, rounding_mode="floor").expand(2, -1)
        model(batch(), segments_BL=documents, readout=lambda x, head, extra: head(x).logsumexp(-1).sum()).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, len(stand_in.calls)

    expected, _ = run("none")
    found, calls = run(name)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert calls == {"none": 3, "selective": 3, "full": 6, "sqrt": 6}[name]
    assert set(stand_in.calls) == {"flash_attn_varlen_func" if segments else "flash_attn_func"}


@pytest.mark.parametrize("segments", [False, True])
def test_auto_knows_what_the_operator_costs(segments):
    q, k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    documents = torch.tensor([[1] * 12 + [2] * 4] * 2) if segments else None
    made = flash()
    plan = made.plan(Pattern(16, None, documents), CPU)
    seen = profile(lambda q: made.attend(q, k, v, plan, scale=1.0) * 2, [k, v], (q,), {})
    costs = {key[0]: operation.cost for operation in seen.operations for key in [operation.key]}
    name = "flash_attn._flash_attn_varlen_forward" if segments else "flash_attn._flash_attn_forward"
    assert costs[name] >= 2 * 2 * (2 * 4 * 16 * (12 if segments else 16) * 8), "two products of 2 · queries · keys · dimensions"


@pytest.mark.parametrize("segments", [False, True])
def test_compiled_blocks(segments):
    expected, found = (on_cpu_grads(segments, compiled) for compiled in (False, True))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=lambda text, key=key: f"{key}: {text}")


def on_cpu_grads(segments: bool, compiled: bool):
    torch.compiler.reset()
    with torch.device("meta"):
        model = llama()
    model = on_cpu(model)
    for block in model.blocks if compiled else ():
        block.compile(backend="aot_eager", fullgraph=True)
    for length in (7, 10):  # documents of other lengths compile at most once more
        documents = torch.arange(LENGTH).div(length, rounding_mode="floor").expand(2, -1) if segments else None
        model.zero_grad()
        model(batch(), segments_BL=documents, readout=lambda x, head, extra: head(x).logsumexp(-1).sum()).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
