"""A model whose layers are divided between processes: the same tokens as transformers gives, for every architecture; and what else there is
to an engine, over ranks."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import fw
import tokens
from conftest import fw as run_fw
from fw.errors import RunError, UserError
from fw.inference.collective import Group
from fw.inference.ranks import First
from fw.inference.steady import Way
from fw.kernels import linear, meeting
from models.architectures import CASES, VOCABULARY

NEW = 12
LENGTHS = (5, 1, 33, 17, 2)
CACHES = {
    "paged": {"name": "paged", "block_size": 4},
    "contiguous": {"name": "contiguous"},
    "int8": {"name": "quantized", "block_size": 4, "to": "int8"},
    "window": {"name": "sliding_window", "block_size": 4, "window": 8, "sinks": 2},
}
ROTATIONS = (
    "llama-theta",
    "llama-linear",
    "llama-dynamic",
    "llama-yarn",
    "llama-yarn-mscale",
    "llama-yarn-attention_factor",
    "llama-llama3",
)
"""In which alone these differ from others; no rank sees them otherwise."""
in_kernels = pytest.mark.skipif(not meeting.available(), reason="no compiler")


def prompts(longest: int = 256) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(tokens.FIRST, VOCABULARY, (min(n, longest - NEW),), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture
def load():
    """Loads models over ranks, which end with the test."""
    there = []

    def loaded(path: Path, **options) -> fw.LLM:
        there.append(fw.LLM(path, **{"tensor": 2, "dtype": "fp32", "kv_cache": CACHES["paged"], **options}))
        return there[-1]

    yield loaded
    for llm in there:
        llm.close()


def expected(model, asked: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens of each prompt and their log-probabilities, by transformers."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True}
    found = []
    for prompt in asked:
        out = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=NEW, **settings)
        ids = out.sequences[0, len(prompt) :].tolist()
        found.append((ids, [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, ids, strict=True)]))
    return found


def check(results, theirs) -> None:
    for result, (ids, logprobs) in zip(results, theirs, strict=True):
        assert result.token_ids == ids
        assert result.logprobs == pytest.approx(logprobs, abs=1e-4)


GREEDY = {"max_tokens": NEW, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("case", [case for case in CASES if case not in ROTATIONS])
def test_every_architecture(small_model, load, case):
    directory = small_model(case)
    asked = prompts(CASES[case].get("max_position_embeddings", CASES[case].get("n_positions", 0)))
    theirs = expected(AutoModelForCausalLM.from_pretrained(directory), asked)
    llm = load(directory, step_tokens=16, max_sequences=4)
    for _ in range(2):  # the second time, beginnings are known
        check(llm.generate(asked, **GREEDY), theirs)
    whole = fw.load_model(directory)
    assert numbers(llm.model) < 0.75 * numbers(whole)
    kept = sum(2 * shape.heads * shape.head_dim for shape in whole.kv_shapes) * 4
    single = all(shape.heads == 1 for shape in whole.kv_shapes)
    assert llm.engine.reads.token_bytes == (2 * kept if single else kept), "of both ranks"


def numbers(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks(small_model, load, ranks):
    """Of which the last one has fewer rows of the vocabulary."""
    directory = small_model("llama-mha-tied")
    llm = load(directory, tensor=ranks, kv_cache="contiguous")
    check(llm.generate(prompts(), **GREEDY), expected(AutoModelForCausalLM.from_pretrained(directory), prompts()))


@in_kernels
@pytest.mark.skipif(not linear.available(), reason="no compiler")
@pytest.mark.parametrize(
    "cache, weights", [*((name, "auto") for name in CACHES if name != "contiguous"), ("paged", "w8a8"), ("paged", "int8_weight_only")]
)
def test_recorded_steps(small_model, load, cache, weights):
    """Are those of Python, to the bit; and so is an answer alone, and among others."""
    options = {"dtype": "bf16", "kv_cache": CACHES[cache], "weights": weights}
    recorded, python = (load(small_model("llama"), replay=on, **options) for on in (True, False))
    whole = fw.LLM(small_model("llama"), **options)
    settings = {**GREEDY, "max_tokens": 30}
    for asked in (prompts(), prompts()[:1]):
        found, other, near = (llm.generate(asked, **settings) for llm in (recorded, python, whole))
        assert [(r.token_ids, r.logprobs) for r in found] == [(r.token_ids, r.logprobs) for r in other]
        for one, like in zip(found, near, strict=True):
            assert one.logprobs[0] == pytest.approx(like.logprobs[0], abs=0.05)
    assert recorded.engine.runner.steady.repeated > 20
    alone = [recorded.generate(prompt, **settings)[0] for prompt in prompts()]
    assert [r.logprobs for r in alone] == [r.logprobs for r in recorded.generate(prompts(), **settings)]


@pytest.fixture
def hears(monkeypatch):
    """Which ways the first rank goes."""
    ways = []
    step = First.step

    @contextmanager
    def heard(self, pieces, way):
        ways.append(way)
        with step(self, pieces, way):
            yield

    monkeypatch.setattr(First, "step", heard)
    return ways


@in_kernels
@pytest.mark.skipif(not linear.available(), reason="no compiler")
def test_all_ranks_go_the_same_way(small_model, load, hears):
    """What is recorded when does not depend on what the first rank alone sees: whose hidden states are wanted, and hooks. A rank that was
    ahead would add up numbers of other steps, or wait for ever for more."""
    directory = small_model("llama")
    llm, whole = load(directory), fw.LLM(directory, dtype="fp32", kv_cache=CACHES["paged"])
    settings = {"temperature": 0, "ignore_eos": True, "logprobs": 0}

    def same(asked, tokens) -> None:
        found, like = (each.generate(asked, max_tokens=tokens, **settings) for each in (llm, whole))
        assert [r.token_ids for r in found] == [r.token_ids for r in like]
        for one, other in zip(found, like, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)

    same([[5, 6, 7]], 2)
    assert llm.embed([[5, 6, 7]])[0] == pytest.approx(whole.embed([[5, 6, 7]])[0], abs=1e-4)
    same([[5]], 4)
    assert hears == [Way.PYTHON] * 4 + [Way.RECORDED, Way.COMPARED, Way.REPEATED]
    with llm.model.blocks[0].register_forward_hook(lambda *_: None):
        same([[5, 6, 7], [8]], 4)
    same([[5], [9]], 4)
    assert hears[-4:] == [Way.RECORDED, Way.COMPARED, Way.REPEATED, Way.REPEATED]


@in_kernels
def test_embeddings_among_answers(small_model, load):
    """In the same steps, and prompts that are scored."""
    directory = small_model("llama")
    found = []
    for llm in (load(directory), fw.LLM(directory, dtype="fp32", kv_cache=CACHES["paged"])):
        results = {}
        for round in range(3):
            for number, prompt in enumerate(prompts()):
                sampling = llm.sampling(max_tokens=4 + 3 * number, temperature=0, ignore_eos=True, prompt_logprobs=2 * round or None)
                llm.engine.add(f"{round} answer {number}", prompt, sampling)
                pooling = ("mean", "last")[number % 2]
                llm.engine.add(f"{round} embedding {number}", prompt[::-1], llm.sampling(), pooling=pooling)
                results |= {result.key: result for result in llm.engine.step()[1]}
            while len(llm.engine):
                results |= {result.key: result for result in llm.engine.step()[1]}
        found.append(results)
    ours, theirs = found
    assert ours.keys() == theirs.keys() and len(ours) == 30
    for key, result in ours.items():
        assert [c.token_ids for c in result.completions] == [c.token_ids for c in theirs[key].completions], key
        assert result.embedding == pytest.approx(theirs[key].embedding, abs=1e-4), key
        assert result.prompt_logprobs == pytest.approx(theirs[key].prompt_logprobs, abs=1e-4), key


def test_without_kernels(small_model, load, monkeypatch):
    monkeypatch.setattr(meeting, "available", lambda: False)
    llm = load(small_model("gpt2"))
    assert isinstance(llm.ranks.collective, Group)
    check(llm.generate(prompts(), **GREEDY), expected(AutoModelForCausalLM.from_pretrained(small_model("gpt2")), prompts()))


def test_sequences_make_room_and_end_when_they_like(small_model, load):
    whole = fw.LLM(small_model("llama"), dtype="fp32", kv_cache=CACHES["paged"])
    kept = sum(2 * shape.heads * shape.head_dim for shape in whole.model.kv_shapes) * 4
    llm = load(small_model("llama"), kv_budget=f"{kept * 64 // 2}B", max_context=60, step_tokens=16, max_sequences=4)
    asked = [*prompts(), *prompts()]
    settings = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    for _ in range(3):
        llm.engine.add("aborted", asked[2], llm.sampling(max_tokens=20))
        for _ in range(3):
            llm.engine.step()
        llm.engine.abort("aborted")
        assert [r.token_ids for r in llm.generate(asked, **settings)] == [r.token_ids for r in whole.generate(asked, **settings)]
    assert llm.engine.scheduler.preemptions
    drawn = {"n": 3, "max_tokens": 8, "temperature": 1.0, "seed": 5}
    for found, like in zip(llm.generate(asked[:3], **drawn), whole.generate(asked[:3], **drawn), strict=True):
        assert [c.token_ids for c in found.completions] == [c.token_ids for c in like.completions]


def test_guesses(small_model, load):
    """Of a draft model, which the first rank has whole."""
    plain = fw.LLM(small_model("llama"), dtype="fp32")
    llm = load(small_model("llama"), speculate=3, draft=str(small_model("llama")))
    found, like = (each.generate(prompts(), **GREEDY) for each in (llm, plain))
    assert [r.token_ids for r in found] == [r.token_ids for r in like]
    assert llm.engine.right_guesses == llm.engine.guesses > 0


@pytest.fixture(scope="module")
def adapters(small_model, tmp_path_factory):
    """Of linear layers that ranks cut into rows, into columns, and that hold several projections; by case."""
    found = {}
    for case, targets in (("llama", "all-linear"), ("gpt2", ["c_attn", "c_proj"])):
        for number in range(2):
            torch.manual_seed(number)
            model = get_peft_model(
                AutoModelForCausalLM.from_pretrained(small_model(case)),
                LoraConfig(r=3 + number, lora_alpha=16, target_modules=targets, init_lora_weights=False, fan_in_fan_out=case == "gpt2"),
            )
            place = tmp_path_factory.mktemp(f"{case}-{number}")
            model.save_pretrained(place)
            found.setdefault(case, []).append(place)
    return found


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_adapters(small_model, load, adapters, case, tmp_path):
    llm = load(small_model(case))
    theirs = {None: expected(AutoModelForCausalLM.from_pretrained(small_model(case)), prompts())}
    for name, place in zip(("one", "two"), adapters[case], strict=True):
        llm.load_adapter(name, place)
        theirs[name] = expected(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(small_model(case)), place), prompts())
    asked = [(prompt, name, number) for name in theirs for number, prompt in enumerate(prompts())]
    for _ in range(2):
        results = llm.generate([prompt for prompt, _, _ in asked], adapter=[name for _, name, _ in asked], **GREEDY)
        check(results, [theirs[name][number] for _, name, number in asked])
        llm.drop_adapter("one")
        llm.load_adapter("one", adapters[case][0])
    gone = shutil.copytree(adapters[case][0], tmp_path / "gone")
    llm.load_adapter("gone", gone)
    shutil.rmtree(gone)
    check(llm.generate(prompts(), adapter="gone", **GREEDY), theirs["one"])
    beside = load(small_model(case), adapter=adapters[case][1])
    check(beside.generate(prompts(), **GREEDY), theirs["two"])


@in_kernels
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_an_adapter_is_computed_as_one_beside_the_model(small_model, load, adapters, case):
    """To the last bit, each rank its part."""
    own, beside = (load(small_model(case), dtype="bf16", **how) for how in ({"adapter": adapters[case][0]}, {}))
    beside.load_adapter("it", adapters[case][0])
    found = [llm.generate(prompts(), adapter=name, **GREEDY) for llm, name in ((own, None), (beside, "it"), (beside, None))]
    ids, again, without = ([(result.token_ids, result.logprobs) for result in results] for results in found)
    assert ids == again != without


@pytest.mark.parametrize("in_memory", [pytest.param(True, marks=in_kernels), False])
def test_a_rank_that_is_killed(small_model, load, monkeypatch, in_memory):
    if not in_memory:
        monkeypatch.setattr(meeting, "available", lambda: False)
    llm = load(small_model("llama"))
    llm.generate(prompts(), **GREEDY)
    os.kill(llm.ranks.pids[0], signal.SIGKILL)
    with pytest.raises(RunError, match=r"rank 1, which computes a part of every layer, was killed by SIGKILL .*; load the model again"):
        llm.generate(prompts(), **GREEDY)
    with pytest.raises(RunError, match="the model's other ranks have been ended; load it again"):
        llm.generate(prompts(), **GREEDY)


SCRIPT = """
import os, signal, sys, threading
import fw
llm = fw.LLM(sys.argv[1], tensor=2, dtype="fp32")
before = llm.generate([[5, 6, 7]], max_tokens=40, temperature=0, ignore_eos=True)[0].token_ids
step, count = llm.engine.runner._run, []
def interrupted(*step_of):
    count.append(1)
    if len(count) == 5:
        signal.raise_signal(signal.SIGINT)
    return step(*step_of)
llm.engine.runner._run = interrupted
try:
    llm.generate([[5, 6, 7]], max_tokens=40, temperature=0, ignore_eos=True)
except KeyboardInterrupt:
    print("interrupted after", len(count))
assert llm.generate([[5, 6, 7]], max_tokens=40, temperature=0, ignore_eos=True)[0].token_ids == before
print(*llm.ranks.pids, flush=True)
sys.stdin.read()
"""


def test_an_interrupt_and_the_end(small_model):
    """Ctrl-C waits for the end of the step, and the model can be used afterwards; ranks do not outlive the first one, however it ends."""
    words = [sys.executable, "-c", SCRIPT, str(small_model("llama"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "interrupted after 5\n"
        other = int(process.stdout.readline())
        alive = os.pidfd_open(other)
        process.kill()
        poll = select.poll()
        poll.register(alive, select.POLLIN)
        assert poll.poll(60_000), "the other rank is there yet"
        os.close(alive)


MINE = """
import fw
from fw_plugins.kv_cache.paged import Paged


@fw.register("mine")
class Mine(Paged):
    '''Paged, of a file.'''
"""


def test_a_plugin_of_a_file(small_model, tmp_path):
    """Every rank knows it; one that this process alone has is refused."""
    (tmp_path / "mine.py").write_text(MINE)
    words = ["generate", str(small_model("llama")), "the fox", "inference.dtype=fp32"]
    said = ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    found = run_fw(*words, "plugins=[./mine.py]", "kv_cache=mine", "inference.tensor=2", *said, cwd=tmp_path).ok()
    assert found.out == run_fw(*words, *said).ok().out
    code = f"{MINE}\nfw.LLM({str(small_model('llama'))!r}, kv_cache='mine', tensor=2)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr
    assert "kv_cache: Mine is of this script alone, and ranks (inference.tensor) are processes of their own" in told


def test_from_the_command_line(small_model, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()))
    words = [
        "generate",
        str(small_model("llama")),
        "inference.tensor=2",
        "inference.dtype=fp32",
        "--input",
        str(source),
        "--output",
        str(target),
    ]
    run_fw(*words, "--temperature", "0", "--max-tokens", str(NEW), "--ignore-eos").ok()
    found = {line["line"]: line["token_ids"] for line in map(json.loads, target.read_text().splitlines())}
    theirs = expected(AutoModelForCausalLM.from_pretrained(small_model("llama")), prompts())
    assert [found[number + 1] for number in range(len(theirs))] == [ids for ids, _ in theirs]


@pytest.mark.parametrize(
    "options, why",
    [
        ({"tensor": 0}, "argument: inference.tensor: 0 is too small; the least is 1"),
        ({"tensor": 3}, "inference.tensor: 3 does not divide 4 attention heads; what does: 1, 2"),
        ({"offload": {"params": "nvme"}}, "offload.params: nvme leaves whole weights in files, and ranks have parts of them"),
        ({"quantization": "nf4"}, "inference.tensor: quantization keeps codes of whole layers, which ranks cannot divide; use tensor: 1"),
    ],
)
def test_what_cannot_be(small_model, options, why):
    with pytest.raises(UserError, match=f"^{re.escape(why)}"):
        fw.LLM(small_model("llama"), **{"tensor": 2, **options})
