"""What generating is planned to take, against what the allocator gives out when it does."""

from __future__ import annotations

import json
import mmap
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fw
import tokens
from conftest import fw as command
from fw.config import Config, overridden
from fw.errors import UserError
from fw.inference.cached import Piece
from fw.inference.divided import Several
from fw.inference.prepare import prepare
from fw.inference.ranks import of_others
from fw.inference.sampling import choose
from fw.inference.telling import tell_prompt
from fw.kernels import linear, meeting
from fw.kernels.meeting import Meeting
from fw.kernels.room import Room
from fw.kinds.kv_cache import Stretch
from fw.meter.allocations import allocations
from fw.meter.document import MemoryDocument
from fw.meter.step_memory import RULES
from fw.planning.generation import plan_generation
from fw.recipe.inference import resolve_inference
from planning.asked import DRAWN, answers

CPU = torch.device("cpu")


def recipe(*overrides: str):
    return resolve_inference(overridden(Config("test", {}, {}), ["inference.max_sequences=4", "inference.device=cpu", *overrides]))


def most(history, files: frozenset[int] = frozenset()) -> int:
    """Bytes more than at the beginning, at the highest; without mapped files, which are known by their sizes."""
    highest = now = 0
    for block, sign in history.changes:
        now += sign * block.nbytes * (block.nbytes not in files)
        highest = max(highest, now)
    return highest


def measured(directory, chosen, ranks=None, context=0) -> tuple[int, int]:
    """At most while it is loaded, and in a step of as many tokens as there may be, at the end of the context, of all of which
    log-probabilities are wanted; and on the first rank in the choice of the next ones, drawn alike, and not."""
    further = ranks is not None and ranks.rank > 0
    with allocations(CPU, RULES) as loading:
        prepared = prepare(directory, of_others(chosen) if further else chosen, None, print, ranks=ranks)
    own, options = prepared.own, chosen.inference
    context = context or own.context
    length = options.step_tokens // options.max_sequences
    length = min(length, context)
    known = 1 + options.speculate
    asked = answers(options.max_sequences, length + 1, others=0.7)
    pieces = []
    for number, answer in enumerate(asked):
        for at in range(0, context, options.prompt_share):
            assert own.cache.reserve(number, at, min(context, at + options.prompt_share))
        stretch = Stretch(number, context - length, length)
        score = None if further else partial(tell_prompt, answer.request)
        pieces.append(Piece(stretch, [3] * length, range(length - known, length), scored=range(length), score=score))
    with allocations(CPU, RULES) as found:
        rows = own.runner.run(pieces)
        for others in () if further else (0.7, 0.8):
            choose([row[-1] for row in rows], answers(options.max_sequences, length, others), range(len(rows)), frozenset())
    sizes = frozenset(file.stat().st_size for file in directory.glob("*.safetensors"))
    return most(loading.history, sizes), most(found.history)


def besides(document: MemoryDocument) -> int:
    parts = document.largest.at_peak
    return sum(parts.values()) - sum(parts.get(name, 0) for name in ("parameters", "buffers", "kv"))


@pytest.fixture
def watched(monkeypatch):
    """What is packed is packed into the allocator's memory, whose events are seen."""
    monkeypatch.setattr(Room, "empty", lambda self, shape, dtype: torch.empty(shape, dtype=dtype))


@pytest.mark.parametrize("case", ["llama", "llama-mha-tied", "gemma2", "gpt2", "qwen3"])
@pytest.mark.parametrize(
    "options",
    [
        ("inference.dtype=fp32",),
        ("inference.dtype=bf16",),
        ("inference.dtype=bf16", "inference.weights=w8a8"),
        ("inference.dtype=bf16", "inference.weights=int8_weight_only", "kv_cache=quantized"),
        ("inference.dtype=bf16", "inference.max_sequences=1"),
    ],
    ids=" ".join,
)
def test_every_byte(small_model, case, options, watched):
    chosen = recipe("inference.step_tokens=64", *options)
    planned = plan_generation(small_model(case), chosen)
    load, step = measured(small_model(case), chosen)
    assert besides(planned) == step
    assert planned.largest.phases["load"].allocated_peak == load


@pytest.mark.parametrize(
    "case, dtype, cache", [("llama", "fp32", "paged"), ("qwen3_moe", "fp32", "paged"), ("llama", "fp16", "contiguous")]
)
def test_every_byte_in_tiles(small_model, case, dtype, cache, watched):
    chosen = recipe("inference.step_tokens=64", f"inference.dtype={dtype}", f"kv_cache={cache}", "inference.batch_invariant=true")
    assert besides(plan_generation(small_model(case), chosen)) == measured(small_model(case), chosen)[1]


@pytest.mark.skipif(not meeting.available(), reason="no compiler")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["llama", "llama-mha-tied", "gemma2", "gpt2", "qwen3"])
def test_every_byte_of_several_ranks(small_model, case, dtype, watched):
    chosen = recipe("inference.step_tokens=64", f"inference.dtype={dtype}", "inference.tensor=2")
    planned = plan_generation(small_model(case), chosen)
    assert planned.world_size == 2
    for rank in planned.per_rank:
        met = Meeting(mmap.mmap(-1, meeting.memory_bytes(2)), rank.rank, 2)
        met.end()  # sums are nobody's, and take as much
        load, step = measured(small_model(case), chosen, Several(rank.rank, 2, "inference.tensor", met))
        one = replace(planned, per_rank=[rank])
        assert (one.largest.phases["load"].allocated_peak, besides(one)) == (load, step), rank.rank


@pytest.mark.skipif(not meeting.available(), reason="no compiler")
def test_a_draft_is_the_first_ranks(small_model, watched):
    """Others check its guesses, and have neither its weights nor its keys and values; their own are as many as on the first rank."""
    directory, draft = small_model("llama"), small_model("llama-mha-tied")
    options = ["inference.step_tokens=64", "inference.dtype=fp32", "inference.tensor=2", "inference.kv_budget=720000B"]
    chosen = recipe(*options, f"inference.draft={draft}", "inference.speculate=4")
    first, other = plan_generation(directory, chosen).per_rank
    alone = plan_generation(directory, recipe(*options)).per_rank[1]
    assert other.at_peak["parameters"] == alone.at_peak["parameters"]
    assert first.at_peak["parameters"] - other.at_peak["parameters"] >= sum(x.nbytes for x in fw.load_model(draft).parameters())
    token, of_draft = 3 * 2 * 1 * 12 * 4, 3 * 2 * 4 * 12 * 4
    share = 720_000 * token // (token + of_draft)
    assert other.at_peak["kv"] == share // (16 * token) * 16 * token, "in whole blocks"
    met = Meeting(mmap.mmap(-1, meeting.memory_bytes(2)), 1, 2)
    met.end()
    second = Several(1, 2, "inference.tensor", met)
    second.agreed = lambda value: share
    load, step = measured(directory, chosen, second, context=share // token // 4 // 16 * 16)
    assert (other.phases["load"].allocated_peak, besides(replace(plan_generation(directory, chosen), per_rank=[other]))) == (load, step)


@pytest.fixture
def wide(tmp_path):
    """A model whose logits take most of a step."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=5000, max_position_embeddings=512, **shape)).save_pretrained(tmp_path)
    tokens.save(tmp_path, 5000)
    return tmp_path


@pytest.mark.parametrize("sequences", [1, 4, 24])
def test_what_requests_ask_for_is_planned(wide, sequences):
    """Log-probabilities of prompts, choices by any rule, guesses: what there is at any time is less than was planned."""
    options = {"dtype": "fp32", "max_sequences": sequences, "step_tokens": 512, "speculate": 3, "replay": False, "kv_budget": "4MiB"}
    words = [f"inference.{name}={value}" for name, value in options.items()]
    planned = besides(plan_generation(wide, recipe(*words)))
    logits = 5000 * 4
    assert planned < 2 * max(32, 12 * sequences) * logits + 1_000_000, "of 512 rows they are never there at once"
    llm = fw.LLM(wide, device="cpu", **options)
    prompt = [number % 9 + 5 for number in range(300)]
    asked = [prompt[number:] for number in range(max(3, sequences))]
    with allocations(CPU, RULES) as found:
        results = llm.generate(asked, max_tokens=8, **DRAWN, logit_bias={7: 100}, logprobs=5, prompt_logprobs=5, ignore_eos=True)
    assert all(len(r.prompt_logprobs) == len(r.prompt_token_ids) - 1 for r in results) and llm.engine.guesses
    assert most(found.history) <= planned


@pytest.mark.parametrize("quantization", ["w4a16 symmetric=true", "w4a16 symmetric=false", "w8a16 symmetric=true"])
def test_every_byte_with_codes(small_model, quantization, watched):
    """Integers; what bitsandbytes' kernels take for themselves is not known."""
    name, option = quantization.split()
    chosen = recipe(
        "inference.step_tokens=64", "inference.dtype=bf16", f"quantization={name}", f"quantization.{option}", "quantization.group_size=16"
    )
    planned = plan_generation(small_model("gemma2"), chosen)
    load, step = measured(small_model("gemma2"), chosen)
    assert (planned.largest.phases["load"].allocated_peak, besides(planned)) == (load, step)


def test_experts(small_model, watched):
    """In fp32; products of bfloat16 take scratch memory of oneDNN's where an expert has few tokens."""
    chosen = recipe("inference.step_tokens=64", "inference.dtype=fp32")
    planned = plan_generation(small_model("mixtral"), chosen)
    assert (planned.largest.phases["load"].allocated_peak, besides(planned)) == measured(small_model("mixtral"), chosen)


def test_weights_in_fewer_bits_in_files_and_of_a_draft(small_model):
    """Against the sizes of what a loaded model has."""

    def kept(llm) -> int:
        files = {tensor.data_ptr() for tensor in llm.model.in_files.values()}
        tensors = {x.data_ptr(): x.untyped_storage().nbytes() for x in [*llm.model.parameters(), *llm.model.buffers()]}
        return sum(size for address, size in tensors.items() if address not in files)

    fp32 = "inference.dtype=fp32"
    for options in (["quantization=w8a16", "quantization.group_size=16"], ["offload.params=nvme", fp32], [fp32]):
        chosen = recipe("inference.dtype=bf16", "inference.replay=false", *options)
        parts = plan_generation(small_model("llama"), chosen).largest.at_peak
        llm = fw.LLM.of(small_model("llama"), chosen)
        if not any(isinstance(module, linear.PackedLinear) and not llm.model.in_files for module in llm.model.modules()):
            assert parts["parameters"] + parts.get("buffers", 0) == kept(llm)
    alone = plan_generation(small_model("llama"), recipe()).largest.at_peak
    both = plan_generation(small_model("llama"), recipe(f"inference.draft={small_model('llama')}", "inference.speculate=2")).largest.at_peak
    assert both["parameters"] == 2 * alone["parameters"] and both["kv"] == 2 * alone["kv"]


def test_a_configuration_is_enough(small_model, tmp_path):
    shutil.copy(small_model("llama") / "config.json", tmp_path)
    assert plan_generation(tmp_path, recipe()).largest.at_peak == plan_generation(small_model("llama"), recipe()).largest.at_peak


def test_a_budget_is_divided(small_model):
    """Keys and values get what weights and a step leave; what generates then is what was planned."""
    free = plan_generation(small_model("llama"), recipe())
    whole, parts = free.largest.taken, free.largest.at_peak
    token = free.generation.token_bytes
    assert token == 2 * 3 * 2 * 12 * 4, "both, of 3 blocks, 2 heads of 12 numbers of 4 bytes"
    budget = whole - parts["kv"] // 2
    planned = plan_generation(small_model("llama"), recipe(f"inference.budget={budget}B"))
    assert planned.fits and budget - 16 * token <= planned.largest.taken <= budget
    assert planned.generation.largest_sequences == 2 and planned.generation.largest_context == 128
    llm = fw.LLM(small_model("llama"), dtype="fp32", device="cpu", max_sequences=4, budget=f"{budget}B")
    assert llm.kv_budget_bytes == planned.largest.at_peak["kv"]
    assert len(llm.generate(["abc"] * 9, max_tokens=100, temperature=0, ignore_eos=True)) == 9
    with pytest.raises(UserError, match=r"inference\.budget: 100KiB is too small: weights and a step take [\d.]+ .*raise it"):
        fw.LLM(small_model("llama"), budget="100KiB")
    with pytest.raises(UserError, match=r"inference\.budget: 1MiB is too small: .* of inference\.kv_budget, 1MiB"):
        fw.LLM(small_model("llama"), budget="1MiB", kv_budget="1MiB")


def test_the_command(small_model):
    told = command("plan", small_model("llama"), "inference.max_sequences=4", "inference.budget=100MiB", "inference.device=cpu").ok().out
    assert "keys and values: 576 B for each token" in told and "wanted are 4 sequences of 256 tokens" in told
    assert "the budget has room for 4 sequences of 256 tokens, or" in told
    raw = json.loads(command("plan", small_model("llama"), "inference.max_sequences=4", "--json", "--device", "cpu").ok().out)
    document = MemoryDocument.from_json(raw)
    assert document.generation.sequences == 4 and document.largest.at_peak["kv"] == 4 * 256 * 576 and document.as_json() == raw
    assert command("plan", small_model("llama"), "inference.budget=1KiB", "--strict", "--device", "cpu").code == 3
    for words, why in (
        (["--fit"], "--fit: is for training runs"),
        (["--device", "h100"], "device 'h100' is not known"),
        (["train.max_steps=3"], "train"),
    ):
        found = command("plan", small_model("llama"), *words)
        assert found.code == 2 and why in found.err
    assert command("plan", "org/none-such").code == 2
