"""What generating on a GPU is planned to take, without one: by hand, and against the CPU's allocator where the same program runs there."""

from __future__ import annotations

import json
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from conftest import fw as command
from fw.checkpointing import elsewhere, streaming
from fw.config import Config, overridden
from fw.errors import UserError
from fw.inference.cached import Piece
from fw.inference.prepare import prepare
from fw.inference.sampling import choose
from fw.inference.telling import tell_prompt
from fw.kinds.kv_cache import Stretch
from fw.meter.allocations import allocations
from fw.meter.devices import DEVICES, MIB
from fw.meter.step_memory import RULES
from fw.planned import PlannedGPU, planning_for
from fw.planning.ask import plan
from fw.planning.generation import plan_generation
from fw.planning.gpu import Gpu
from fw.recipe.inference import resolve_inference
from planning.asked import answers

CPU = torch.device("cpu")
H100 = DEVICES["h100-80gb"]


@contextmanager
def as_on(gpu):
    with planning_for(PlannedGPU(gpu.name, gpu.compute_capability, lambda tensor: tensor.device.type == "meta")):
        yield


def recipe(*overrides: str):
    with as_on(H100):
        return resolve_inference(overridden(Config("test", {}, {}), ["inference.max_sequences=4", *overrides]))


def most(history) -> int:
    """Bytes more than at the beginning, at the highest; without numbers that a CPU's operators alone make tensors of (``x / 2``)."""
    highest = now = 0
    for block, sign in history.changes:
        if block.nbytes <= 8:
            continue
        now += sign * block.nbytes
        highest = max(highest, now)
    return highest


@contextmanager
def page_locked_elsewhere():
    """Host memory that torch's allocator does not see: here all is host memory."""
    zeros = torch.zeros

    def locked(shape, dtype):
        return torch.from_numpy(np.zeros(torch.empty(shape, dtype=dtype, device="meta").nbytes, "uint8")).view(dtype).view(shape)

    def made(*sizes, pin_memory=False, dtype=None, **how):
        if not pin_memory:
            return zeros(*sizes, dtype=dtype, **how)
        return torch.from_numpy(np.zeros(sizes[0] if len(sizes) == 1 else sizes, str(dtype).removeprefix("torch.")))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "zeros", made)
        patched.setattr(elsewhere, "host_memory", locked)
        patched.setattr(streaming, "host_memory", locked)
        yield


def measured(directory, chosen) -> tuple[int, int]:
    """The program of a GPU, whose kernels compute nothing, in the CPU's memory: loading, and a step as a plan takes it to be worst, with
    the one that is begun ahead."""
    with as_on(H100), page_locked_elsewhere(), allocations(CPU, RULES) as loading:
        prepared = prepare(directory, chosen, None, print)
    own, options = prepared.own, chosen.inference
    length = min(options.step_tokens // options.max_sequences, own.context)
    asked = answers(options.max_sequences, length + 1, others=0.7)
    pieces, following = [], []
    for number, answer in enumerate(asked):
        assert own.cache.reserve(number, 0, own.context)
        stretch, score = Stretch(number, own.context - length, length), partial(tell_prompt, answer.request)
        pieces.append(Piece(stretch, [3] * length, range(length - 1, length), scored=range(length), score=score))
        following.append(Piece(Stretch(number, own.context - 1, 1), (), range(1)))
    with as_on(H100), page_locked_elsewhere(), allocations(CPU, RULES) as found:
        rows = own.runner.run(pieces)
        for others in (0.8, 0.7):
            chosen_ones = choose([row[-1] for row in rows], answers(len(rows), length, others), range(len(rows)), frozenset())
        ahead = own.runner.run(following, chosen_ones.tokens_B)
        for others in (0.8, 0.7):
            choose([row[-1] for row in ahead], answers(len(rows), length, others), range(len(rows)), frozenset())
    sizes = frozenset(file.stat().st_size for file in directory.glob("*.safetensors"))
    loaded = [(block, sign) for block, sign in loading.history.changes if block.nbytes not in sizes]
    loading.history.changes[:] = loaded
    return most(loading.history), most(found.history)


@pytest.mark.parametrize("case", ["llama", "llama-mha-tied", "gemma2", "gpt2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [(), ("kv_cache=quantized",), ("offload.params=cpu",), ("offload.params=nvme",), ("offload.params=cpu", "offload.modules=['*.1']")],
    ids=" ".join,
)
def test_the_program_of_a_gpu_takes_as_much_anywhere(small_model, case, options):
    chosen = recipe("inference.step_tokens=64", "inference.dtype=fp32", "inference.replay=false", "inference.kv_budget=4MiB", *options)
    planned = plan_generation(small_model(case), chosen, gpu=H100).largest
    load, step = measured(small_model(case), chosen)
    assert planned.phases["load"].allocated_peak == load
    assert planned.at_peak["temporary"] == step


@pytest.mark.parametrize("options", [("inference.dtype=bf16",), ("inference.dtype=fp32", "quantization={name: w8a16, group_size: 16}")])
@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_kernels_of_16_bits_and_codes(small_model, case, options, monkeypatch):
    chosen = recipe("inference.step_tokens=64", "inference.replay=false", "inference.kv_budget=4MiB", *options)
    planned = plan_generation(small_model(case), chosen, gpu=H100).largest
    if chosen.inference.dtype == "bf16":  # oneDNN takes scratch memory for such products
        monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight, bias=None: x.new_empty(*x.shape[:-1], len(weight)))
    assert (planned.phases["load"].allocated_peak, planned.at_peak["temporary"]) == measured(small_model(case), chosen)


def test_experts(small_model):
    chosen = recipe("inference.step_tokens=64", "inference.dtype=fp32", "inference.replay=false", "inference.kv_budget=4MiB")
    planned = plan_generation(small_model("mixtral"), chosen, gpu=H100).largest
    assert (planned.phases["load"].allocated_peak, planned.at_peak["temporary"]) == measured(small_model("mixtral"), chosen)


SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4}
VOCABULARY, CONTEXT = 50_000, 2048


@pytest.fixture
def model(tmp_path):
    """A directory without weights."""
    told = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
    (tmp_path / "config.json").write_text(json.dumps({**told, **SHAPE, "tie_word_embeddings": False}))
    return tmp_path


ATTENTION, MLP = 1024 * (2 * 1024 + 2 * 256), 3 * 1024 * 4096
WEIGHTS = 2 * (2 * VOCABULARY * 1024 + 3 * (ATTENTION + MLP + 2 * 1024) + 1024)
"""Bytes in bf16."""


def test_by_hand(model):
    """Weights; keys and values in whole blocks; while layers are joined one group twice, and no more."""
    chosen = recipe("inference.dtype=bf16", "inference.kv_budget=10MB", "inference.max_context=256")
    planned = plan_generation(model, chosen, gpu=H100)
    rank = planned.largest
    assert rank.at_peak["parameters"] == WEIGHTS
    token = 2 * 3 * 4 * 64 * 2
    assert planned.generation.token_bytes == token
    assert rank.at_peak["kv"] == 10_000_000 // (16 * token) * 16 * token
    assert rank.phases["load"].allocated_peak == WEIGHTS + 2 * 2 * 1024 * 4096
    assert rank.driver_peak == rank.reserved_peak + H100.context_bytes and planned.budget == H100.memory_bytes
    assert rank.reserved_peak >= rank.allocated_peak >= sum(rank.at_peak.values()) - 1


def test_recordings_by_hand(model):
    """What stays of each: logits in fp32, ids and positions, the rows that are wanted, and where its sequences are. Two handles of
    cuBLAS have a workspace each, that of the recording's stream and the other."""
    options = ["inference.dtype=bf16", "inference.kv_budget=64MB", "inference.max_sequences=24"]
    without = plan_generation(model, recipe(*options, "inference.replay=false"), gpu=H100).largest
    recorded = plan_generation(model, recipe(*options), gpu=H100).largest
    sizes = (1, 2, 4, 8, 16, 24)
    tables = CONTEXT // 16
    kept = sum(n * (4 * VOCABULARY + 2 * 8 + 8 + 4 * (2 + tables + 4)) for n in sizes) + H100.cublas_workspace_bytes
    assert recorded.at_peak["other"] - without.at_peak["other"] == pytest.approx(kept, abs=2 * MIB), "the allocator rounds up"
    assert without.at_peak["other"] == pytest.approx(H100.cublas_workspace_bytes, abs=4 * MIB)
    least = recorded.reserved_peak - without.reserved_peak
    assert least > kept, "what a recording computes with is its own, too"


def test_what_fits_a_smaller_gpu(model):
    """A budget, and the GPU's memory where there is none; the CPU's options are the CPU's."""
    small = plan(model, "inference.dtype=bf16", "inference.budget=1280MiB", device="rtx4090")
    assert small.device == "rtx4090" and small.fits and small.budget == 1280 * MIB
    assert small.budget - small.largest.taken < 64 * MIB, "what is left is for keys and values"
    whole = plan(model, "inference.dtype=bf16", "inference.max_context=2048", "inference.max_sequences=1", device="rtx4090")
    assert whole.budget == DEVICES["rtx4090"].memory_bytes and whole.generation.sequences == 1
    assert not plan(model, "inference.budget=300MiB", "inference.dtype=bf16", device="rtx4090").fits
    old = plan(model, "inference.dtype=fp16", "inference.max_sequences=2", device="v100-32gb")
    assert old.largest.at_peak["parameters"] == WEIGHTS
    halves = plan(model, "inference.dtype=bf16", "inference.tensor=2", "inference.max_sequences=2", device="h100-80gb")
    assert halves.world_size == 2 and halves.largest.at_peak["parameters"] == pytest.approx(WEIGHTS / 2, rel=0.01)
    assert halves.largest.driver_peak > halves.largest.reserved_peak + 500 * MIB, "NCCL's buffers"
    for words, why in (
        (["inference.device=cpu"], "inference.device: cpu, and --device asks what it takes on h100-80gb"),
        (
            ["inference.weights=w8a8", "inference.dtype=bf16"],
            "is of layers in bfloat16 on the CPU; set inference.dtype: bf16, inference.device: cpu",
        ),
        (["offload.params=nvme", "inference.tensor=2"], "leaves whole weights in files, and ranks have parts of them"),
    ):
        with pytest.raises(UserError, match=why):
            plan(model, *words, device="h100-80gb")
    with pytest.raises(UserError, match="fp8 needs a GPU of compute capability"):
        plan(model, "kv_cache={name: quantized, to: fp8}", device="a100-80gb")
    assert plan(model, "kv_cache={name: quantized, to: fp8}", "inference.dtype=bf16", device="h100-80gb").fits


@pytest.mark.parametrize("cache", ["contiguous", "sliding_window", "{name: quantized, to: int4}"])
def test_caches(model, cache):
    planned = plan(model, f"kv_cache={cache}", "inference.dtype=bf16", "inference.max_sequences=2", device="h100-80gb")
    assert planned.largest.at_peak["kv"] > 0 and planned.fits


def test_the_command(model):
    told = command("plan", model, "--device", "h100-80gb", "inference.dtype=bf16").ok().out
    assert "1 rank on h100-80gb" in told and "driver" in told and "the budget has room for 64 sequences of 2,048 tokens" in told
    raw = json.loads(command("plan", model, "--device", "a100-40gb", "--json", "inference.dtype=bf16").ok().out)
    assert raw["device"] == "a100-40gb" and raw["per_rank"][0]["driver_peak_bytes"] > raw["per_rank"][0]["reserved_peak_bytes"]


@pytest.mark.parametrize("rows, values", [(1, 12 + 8), (16, 8 + 8 + 4 + 12), (128, 8 + 12)])
def test_sorting_by_hand(rows, values):
    """Beside keys of 4 bytes and 8-byte indices: of one row at a time, of all as one, and in segments."""
    taken = []
    gpu = Gpu(H100, lambda number, block: taken.append(block.nbytes), lambda number: None)
    x = torch.zeros(rows, 5000, device="meta")
    gpu.ran(torch.ops.aten.sort.stable, (x,), {}, None)
    assert sum(taken) == values * x.numel()
    taken.clear()
    gpu.ran(torch.ops.aten.sort.stable, (x[:, :4096],), {}, None)
    assert not taken
