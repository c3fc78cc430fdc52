"""Weights that a device has no room for: where a plan puts them, by hand; and that what it says fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import fw
import tokens
from conftest import fw as command
from fw.config import Config, overridden
from fw.errors import UserError
from fw.meter.devices import DEVICES, MIB
from fw.planning import placing
from fw.planning.ask import plan
from fw.planning.placing import placed_here
from fw.recipe.inference import resolve_inference
from models.architectures import CASES, VOCABULARY

LAYERS, VOCAB = 12, 8000
SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4}
BLOCK = 2 * (1024 * (2 * 1024 + 2 * 256) + 3 * 1024 * 4096)
"""Bytes of a block's matrices in bf16."""
REST = 2 * (2 * VOCAB * 1024 + (2 * LAYERS + 1) * 1024)
SMALL = "rtx4090"
OPTIONS = ("inference.dtype=bf16", "inference.max_sequences=2", "inference.replay=false", "inference.kv_budget=16MiB")


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch):
    """What this process has of the host's memory besides is not asked for here."""
    for place in ("generation", "plan"):
        monkeypatch.setattr(f"fw.planning.{place}.held_bytes", lambda device: 0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory without weights."""
    told = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**told, **SHAPE, "tie_word_embeddings": False}))
    return tmp_path


def test_by_hand(model):
    """On the device room for two blocks; in the host's memory, to the byte, all of them, or of files what two have on their way."""
    whole = plan(model, *OPTIONS, device=SMALL)
    assert whole.largest.at_peak["parameters"] == REST + LAYERS * BLOCK and whole.generation.brought_bytes == 0
    on_host = plan(model, *OPTIONS, "offload.params=cpu", device=SMALL)
    assert on_host.largest.at_peak["parameters"] == REST + 2 * BLOCK
    assert on_host.largest.host_peak - whole.largest.host_peak == LAYERS * BLOCK
    assert on_host.generation.brought_bytes == LAYERS * BLOCK
    assert on_host.generation.brought_seconds == pytest.approx(LAYERS * BLOCK / DEVICES[SMALL].host_bandwidth)
    in_files = plan(model, *OPTIONS, "offload.params=nvme", device=SMALL)
    assert in_files.largest.at_peak["parameters"] == REST + 2 * BLOCK
    assert in_files.largest.host_peak - whole.largest.host_peak == 2 * BLOCK
    assert in_files.generation.brought_seconds is None
    some = plan(model, *OPTIONS, "offload.params=cpu", f"offload.budget={REST + 9 * BLOCK}B", device=SMALL)
    assert some.largest.at_peak["parameters"] == REST + 9 * BLOCK and some.generation.brought_bytes == 5 * BLOCK
    assert "come to the GPU in every step: " in repr(some)
    raw = json.loads(command("plan", model, "--device", SMALL, "--json", *OPTIONS, "offload.params=cpu").ok().out)
    assert raw["generation"]["brought_bytes"] == LAYERS * BLOCK


def test_bounds_that_are_said(model):
    """The device first, then the host's memory; the rest stays in files."""
    bounds = f"offload={{params: auto, max_memory: {{device: {REST + 6 * BLOCK}B, cpu: {5 * BLOCK}B}}}}"
    found = plan(model, *OPTIONS, bounds, device=SMALL)
    assert found.largest.at_peak["parameters"] == REST + 6 * BLOCK and found.generation.brought_bytes == 8 * BLOCK
    whole = plan(model, *OPTIONS, device=SMALL)
    assert found.largest.host_peak - whole.largest.host_peak == 5 * BLOCK + 2 * BLOCK, "and what three blocks pass through"
    assert found.generation.brought_seconds is None


def test_what_is_left_is_for_weights(model):
    """A plan says what all else takes. Where all fit, none leaves; else as many stay as there is room for."""
    roomy = plan(model, *OPTIONS, "offload.params=auto", device=SMALL)
    assert roomy.generation.brought_bytes == 0
    whole = roomy.largest.taken
    tight = plan(model, *OPTIONS, "offload.params=auto", f"inference.budget={whole - 4 * BLOCK}B", device=SMALL)
    assert tight.fits and tight.budget - tight.largest.taken < BLOCK + 64 * MIB
    assert tight.generation.brought_seconds is not None, "nobody says what the host of another machine has"
    assert tight.largest.at_peak["kv"] == roomy.largest.at_peak["kv"]
    divided = plan(model, *OPTIONS[:3], "offload.params=auto", f"inference.budget={whole - 4 * BLOCK}B", device=SMALL)
    assert divided.fits and divided.largest.at_peak["kv"] > 0
    with pytest.raises(UserError, match=r"offload.params: auto: with as few weights on the device as can be, .* give keys and values less"):
        plan(model, *OPTIONS, "offload.params=auto", f"inference.budget={REST + BLOCK}B", device=SMALL)


RUN = """
model: {{name: auto, path: {base}}}
peft: {{name: lora, rank: 8, targets: [all-linear]}}
data: {{name: synthetic, vocab_size: 8000, samples: 16}}
train: {{global_batch_size: 2, sequence_length: 64, max_steps: 3, run_dir: run, sample_tokens: 0}}
precision: bf16
"""


@pytest.mark.slow
def test_a_frozen_base(model, tmp_path):
    """Trained adapters, their gradients and what is kept for backward are as without; the base has two places, forward and backward."""
    (tmp_path / "run.yaml").write_text(RUN.format(base=model))
    run = tmp_path / "run.yaml"
    whole = plan(run, device=SMALL)
    for words, host in (
        (["offload.params=cpu"], LAYERS * BLOCK),
        (["offload.params=cpu", "sharding=ddp"], LAYERS * BLOCK),
        (["offload.params=nvme"], 2 * BLOCK),
    ):
        found = plan(run, *words, device=SMALL)
        one, other = found.largest, plan(run, *words[1:], device=SMALL).largest if words[1:] else whole.largest
        assert other.most["parameters"] - one.most["parameters"] == (LAYERS - 2) * BLOCK
        assert [one.most[part] for part in ("gradients", "optimizer")] == [other.most[part] for part in ("gradients", "optimizer")]
        assert one.most["activations"] == pytest.approx(other.most["activations"], abs=1 << 16)
        assert one.host_peak - other.host_peak == pytest.approx(host, abs=1 << 16)
        bandwidth = DEVICES[SMALL].host_bandwidth
        assert found.step_time > LAYERS * BLOCK / bandwidth, "each comes for forward and for backward, but for the last two"
    some = plan(run, "offload.params=cpu", "offload.modules=['layers.[0-5].*']", "activation=full", device=SMALL).largest
    assert some.most["parameters"] == whole.largest.most["parameters"] - 4 * BLOCK
    for words, why in (
        (["peft=none"], "offload.params: cpu leaves frozen weights in host memory, and all of this model trains"),
        (["sharding=fsdp", "offload.budget=1GiB"], "offload.budget: fsdp brings all parameters from host memory"),
        (["sharding={name: zero, stage: 3}", "offload.modules=[layers.1]"], "offload.modules: DeepSpeed brings all parameters"),
        (["offload.params=auto"], "a run does not find out what frozen weights may take"),
        (["offload={params: auto, max_memory: {cpu: 1GiB}}"], "a run does not find out what frozen weights may take of a GPU"),
        (["precision={name: bf16, full_eval: true}", "model.path=null", "model.name=mixtral"], "precision.full_eval converts weights once"),
    ):
        with pytest.raises(UserError, match=why):
            plan(run, "offload.params=cpu", *words, device="cpu" if "sharding" in words[0] else SMALL)
    bound = f"offload={{params: auto, max_memory: {{device: {REST + 6 * BLOCK}B}}}}"
    some = plan(run, bound, device=SMALL).largest
    assert whole.largest.most["parameters"] - some.most["parameters"] >= 4 * BLOCK, "the rest is on a host of which nothing is known"
    assert some.host_peak - whole.largest.host_peak > 6 * BLOCK


@pytest.fixture
def generates(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    shape = {**CASES["llama"], "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)).save_pretrained(tmp_path)
    tokens.save(tmp_path, VOCABULARY)
    return tmp_path


def answers(llm: fw.LLM) -> list[list[int]]:
    return [result.token_ids for result in llm.generate(["the fox", "what"], temperature=0, max_tokens=6, ignore_eos=True)]


def test_on_a_cpu(generates):
    """Whose memory is the device's: the rest stays in the files."""
    whole = fw.LLM(generates)
    weights = sum(p.nbytes for p in whole.model.parameters())
    bound = fw.LLM(generates, offload={"params": "auto", "max_memory": {"cpu": f"{weights // 2}B"}})
    there = sum(tensor.nbytes for tensor in bound.model.in_files.values())
    assert weights / 2 <= there <= weights / 2 + 512 * 128 * 4 and answers(bound) == answers(whole)
    assert not fw.LLM(generates, offload={"params": "auto"}).model.in_files, "there is room"
    needed = plan(generates, "inference.device=cpu", "inference.kv_budget=1MiB").largest.taken
    budget = needed - weights // 2
    tight = fw.LLM(generates, offload={"params": "auto"}, budget=f"{budget}B", kv_budget="1MiB")
    left = sum(tensor.nbytes for tensor in tight.model.in_files.values())
    assert weights / 2 <= left <= weights / 2 + 512 * 128 * 4 and answers(tight) == answers(whole)


def test_what_is_free_bounds_a_cpu(generates, monkeypatch):
    """And not what the machine has: others have some of it, and a container has a limit."""
    needed = plan(generates, "inference.device=cpu", "inference.kv_budget=1MiB").largest.taken
    for free, stays in ((needed + (1 << 20), False), (needed - (1 << 20), True)):
        monkeypatch.setattr(placing, "available_bytes", lambda device, free=free: free)
        config = overridden(Config("test", {}, {}), ["offload={params: auto}", "inference.kv_budget=1MiB", "inference.device=cpu"])
        found = placed_here(generates, resolve_inference(config))
        assert (found.offload.params == "nvme") == stays and not found.inference.budget


def test_bounds_need_no_known_gpu(generates, monkeypatch):
    """Nor a plan."""
    monkeypatch.setattr(placing, "device_of", lambda wanted: torch.device("cuda"))
    monkeypatch.setattr(placing, "available_bytes", lambda device: 1000)
    words = ["offload={params: auto, max_memory: {device: 20GiB, cpu: 8GiB}}", "offload={params: auto, max_memory: {device: 20GiB}}"]
    for word, host in zip(words, (8 << 30, 800), strict=True):
        policy = placed_here(generates, resolve_inference(overridden(Config("test", {}, {}), [word]))).offload
        assert (policy.params, policy.budget, policy.host_budget, policy.automatic) == ("nvme", 20 << 30, host, False)


def test_replicas_share_the_host(generates):
    """Which nobody can divide who starts at the same time."""
    found = command("serve", generates, "serve.replicas=2", "offload.params=auto")
    assert found.code == 2 and "2 replicas share the host's memory; say what the weights of each may take of it" in found.err


@pytest.mark.parametrize(
    ("offload", "says"),
    [
        ("{params: cpu, max_memory: {cpu: 1GiB}}", "offload.max_memory: is for params: auto, which is cpu"),
        ("{params: auto, budget: 1GiB}", "offload.budget: params: auto takes max_memory"),
        ("{params: auto, path: x}", "offload.path: params: auto takes nothing"),
        ("{params: auto, max_memory: {0: 1GiB}}", "'0' is none of device and cpu"),
        ("{params: auto, max_memory: {cpu: much}}", "much"),
        ("{params: cpu, modules: [nowhere]}", "no parameter of the model is in 'nowhere'"),
    ],
)
def test_what_cannot_be(model, offload, says):
    with pytest.raises(UserError, match=says):
        plan(model, *OPTIONS, f"offload={offload}", device=SMALL)
