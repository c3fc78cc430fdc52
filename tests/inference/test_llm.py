"""The Python interface: prompts of all kinds, answers as they come, what is asked for and what cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import fw
import tokens
from fw.errors import UserError
from fw.inference.prepare import device_of
from fw.kernels import linear
from fw.meter.memory import anonymous_bytes
from models.architectures import VOCABULARY, save

PROMPT = "the quick brown fox"


def test_prompts_of_all_kinds(llm, alone):
    ids = llm.tokenizer.encode(PROMPT)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "who"}]
    rendered = llm.tokenizer.encode("s.be kind!u.who!a.", add_special_tokens=False)
    assert alone(llm, PROMPT).token_ids == alone(llm, ids).token_ids
    assert alone(llm, messages).prompt_token_ids == rendered
    many = llm.generate([PROMPT, ids, messages, rendered], temperature=0, max_tokens=12)
    assert [each.token_ids for each in many] == [alone(llm, each).token_ids for each in (PROMPT, ids, messages, rendered)]
    assert many[0].text == llm.tokenizer.decode(many[0].token_ids, skip_special_tokens=True)


def test_logits_that_are_no_numbers_end_an_answer(directory, alone):
    """And no other one of the same steps."""
    llm = fw.LLM(directory, dtype="fp32")
    run = llm.engine.runner.run
    expected = alone(llm, "abc").token_ids

    def broken(pieces):
        return [rows_RV * torch.nan if len(piece.tokens) == 9 else rows_RV for piece, rows_RV in zip(pieces, run(pieces), strict=True)]

    llm.engine.runner.run = broken
    llm.engine.add("broken", [5] * 9, llm.sampling(temperature=0, n=2))
    llm.engine.add("whole", llm.encode("abc"), llm.sampling(temperature=0, max_tokens=12))
    deltas, results = llm.engine.step()
    assert [(delta.token, delta.finish_reason) for delta in deltas[:2]] == [(None, "abort")] * 2
    (result,) = results
    assert result.error.startswith("no token can be chosen") and [each.token_ids for each in result.completions] == [[], []]
    while len(llm.engine):
        _, results = llm.engine.step()
    assert results[0].token_ids == expected
    with pytest.raises(UserError, match="no token can be chosen"):
        llm.generate([[5] * 9])
    with pytest.raises(UserError, match="no token can be chosen"):
        list(llm.stream([5] * 9))
    whole, failed = llm.generate(["abc", [5] * 9], temperature=0, max_tokens=12)
    assert whole.token_ids == expected and whole.error is None
    assert failed.error.startswith("no token can be chosen"), "a result for each prompt, of which others are whole"


def test_a_step_that_fails_ends_what_had_begun(directory, monkeypatch, alone):
    """How far its sequences are is not known: no stream goes on with tokens of another one's."""
    llm = fw.LLM(directory, dtype="fp32", max_sequences=2)
    streams = [llm.stream(prompt, temperature=0, max_tokens=9) for prompt in ("abc", "hello", "later")]
    for stream in (*streams[:2], streams[0]):  # the first one's second token came with the other's first
        next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "computed", lambda taken: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(streams[0])
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero"):
        list(streams[1])
    assert [delta.token for delta in streams[2]] == alone(llm, "later", max_tokens=9).token_ids
    assert not len(llm.engine) and not llm.engine.scheduler.cache.pool.tables


def test_an_interrupt_waits_for_the_end_of_a_step(directory, monkeypatch, alone):
    llm = fw.LLM(directory, dtype="fp32")
    expected = [alone(llm, prompt, max_tokens=9).token_ids for prompt in ("abc", "hello")]
    first, second = (llm.stream(prompt, temperature=0, max_tokens=9) for prompt in ("abc", "hello"))
    next(first)
    found = [next(second).token]
    next(first)
    computed = llm.engine.scheduler.computed

    def interrupted(taken):
        computed(taken)
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored
    try:
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine.scheduler, "computed", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(first)
    finally:
        signal.signal(signal.SIGINT, before)
    found += [delta.token for delta in second]
    assert found == expected[1] and not len(llm.engine)


def test_chance_comes_from_the_seed_alone(llm, alone):
    one = alone(llm, PROMPT, temperature=1.0, seed=5)
    others = llm.generate(["abc", PROMPT, "x" * 30], temperature=1.0, seed=5, max_tokens=12)
    assert others[1].token_ids == one.token_ids, "beside others"
    assert alone(llm, PROMPT, temperature=1.0, seed=6).token_ids != one.token_ids
    unseeded = {tuple(alone(llm, PROMPT, temperature=1.0).token_ids) for _ in range(3)}
    assert len(unseeded) == 3


def test_several_answers(llm, alone):
    result = alone(llm, PROMPT, n=4, temperature=1.0, seed=1)
    assert [each.index for each in result.completions] == [0, 1, 2, 3]
    assert len({tuple(each.token_ids) for each in result.completions}) == 4
    assert result.token_ids == alone(llm, PROMPT, temperature=1.0, seed=1).token_ids, "the first is the one there is alone"
    best = alone(llm, PROMPT, n=2, best_of=4, temperature=1.0, seed=1)
    means = sorted((sum(each.logprobs) / len(each.logprobs) for each in result.completions), reverse=True)
    assert [sum(each.logprobs) / len(each.logprobs) for each in best.completions] == pytest.approx(means[:2], abs=1e-5)


def test_what_ends_an_answer(llm, alone):
    whole = alone(llm, PROMPT, max_tokens=20)
    token, text = whole.token_ids[6], whole.text
    result = alone(llm, PROMPT, max_tokens=20, stop_token_ids=[token])
    at = whole.token_ids.index(token)
    assert result.token_ids == whole.token_ids[: at + 1] and result.text == llm.tokenizer.decode(whole.token_ids[:at])
    assert (result.finish_reason, result.completions[0].stopped_by) == ("stop", token)
    result = alone(llm, PROMPT, max_tokens=20, stop=text[5:7])
    assert result.text == text[: text.index(text[5:7])] and result.completions[0].stopped_by == text[5:7]
    assert alone(llm, PROMPT, max_tokens=20, stop=text[5:7], min_tokens=15).token_ids[:15] == whole.token_ids[:15]


def test_logprobs_beside_the_token(llm, alone):
    result = alone(llm, PROMPT, logprobs=4)
    for token, logprob, top in zip(result.token_ids, result.logprobs, result.top_logprobs, strict=True):
        assert len(top) == 4 and next(iter(top)) == token and top[token] == pytest.approx(logprob)
    assert alone(llm, PROMPT, logprobs=None).logprobs == []


def test_the_models_own_ways(directory, tmp_path, alone):
    """``generation_config.json``: what ends a text, and how tokens are chosen."""
    greedy = alone(fw.LLM(directory), PROMPT, max_tokens=30)
    copy = tmp_path / "model"
    shutil.copytree(directory, copy)
    end = greedy.token_ids[4]
    chosen = {"do_sample": True, "temperature": 0.5, "top_k": 3, "eos_token_id": [end, 2]}
    (copy / "generation_config.json").write_text(json.dumps(chosen))
    llm = fw.LLM(copy)
    assert (llm.defaults.temperature, llm.defaults.top_k) == (0.5, 3)
    result = alone(llm, PROMPT, max_tokens=30)
    assert result.token_ids == greedy.token_ids[: greedy.token_ids.index(end) + 1] and result.finish_reason == "stop"
    assert result.completions[0].stopped_by is None and end not in llm.tokenizer.encode(result.text, add_special_tokens=False)
    assert alone(llm, PROMPT, max_tokens=30, ignore_eos=True).token_ids == greedy.token_ids
    longer = alone(llm, PROMPT, max_tokens=30, min_tokens=10).token_ids
    assert len(longer) >= 10 and end not in longer[:9]


def test_a_model_that_is_not_drawn_from(directory, tmp_path, alone):
    """As transformers generates with the file: the likeliest tokens, and the penalty; a request may say otherwise."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    said = {"do_sample": False, "temperature": 0.7, "top_k": 3, "repetition_penalty": 1.3}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    llm = fw.LLM(tmp_path, dtype="fp32")
    (result,) = llm.generate(PROMPT, max_tokens=20, ignore_eos=True)
    theirs, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.tensor([result.prompt_token_ids])
    assert theirs.generation_config.repetition_penalty == 1.3
    expected = theirs.generate(ids, max_new_tokens=20, eos_token_id=None, pad_token_id=0)[0, ids.shape[1] :]
    assert result.token_ids == expected.tolist() != alone(llm, PROMPT, max_tokens=20, ignore_eos=True, repetition_penalty=1.0).token_ids
    drawn = llm.sampling(temperature=0.9)
    assert (drawn.temperature, drawn.top_k, drawn.repetition_penalty) == (0.9, 0, 1.3)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "repetition_penalty": 1.3}))
    unsaid = fw.LLM(tmp_path, dtype="fp32").defaults
    assert (unsaid.temperature, unsaid.repetition_penalty) == (1.0, 1.3)


@pytest.mark.parametrize(
    "said, why",
    [({"top_p": 0}, "top_p and repetition_penalty must be above 0"), ({"top_k": "many"}, "top_k: 'many' is no whole number")],
)
def test_what_a_model_says_of_itself_is_named_where_it_is_wrong(directory, tmp_path, said, why):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "top_k": -1}))
    assert fw.LLM(tmp_path).defaults.top_k == 0, "-1 is vLLM's word for all"
    file.write_text(json.dumps({"do_sample": True, **said}))
    with pytest.raises(UserError, match=f"^{re.escape(str(file))}: {why}"):
        fw.LLM(tmp_path)


@pytest.mark.skipif(not linear.available(), reason="no compiler")
@pytest.mark.parametrize("case, threads", [("llama", 1), ("mixtral", 2)])
def test_torch_has_its_threads_where_products_are_its_own(tmp_path, case, threads):
    """Beside kernels of fw's own they would be in the way; experts are torch's."""
    save(case, tmp_path).bfloat16().save_pretrained(tmp_path)
    tokens.save(tmp_path, VOCABULARY)
    before, found = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        llm = fw.LLM(tmp_path)
        llm.model.blocks[0].register_forward_hook(lambda *_: found.append(torch.get_num_threads()))
        llm.generate([[5, 6, 7]], max_tokens=1, ignore_eos=True)
    finally:
        torch.set_num_threads(before)
    assert set(found) == {threads}


def test_an_end_that_the_model_does_not_have(directory, tmp_path, alone):
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 131, -1]}))
    llm = fw.LLM(tmp_path, dtype="fp32")
    assert llm.engine.ends == {2}
    assert len(alone(llm, PROMPT, min_tokens=12).token_ids) == 12


def test_a_decoder_that_is_for_whole_texts_alone(directory, tmp_path):
    """Before there are requests, which would be in the way of others."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError, match=r"answers are given as they come, and .* piece by piece with the decoder WordPiece"):
        fw.LLM(tmp_path)


@pytest.mark.parametrize("count, there", [(1, "cuda:0 alone"), (2, "cuda:0 to cuda:1")])
def test_a_gpu_that_is_not_there(monkeypatch, count, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert device_of(f"cuda:{count - 1}") == torch.device("cuda", count - 1)
    with pytest.raises(UserError, match=f"inference.device: 'cuda:9' is not there; this machine has {there}"):
        device_of("cuda:9")


def test_an_adapter_stays_beside_the_weights(directory, tmp_path, alone):
    base = AutoModelForCausalLM.from_pretrained(directory)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory), tmp_path).eval()
    llm = fw.LLM(directory, adapter=tmp_path)
    ids = llm.tokenizer.encode(PROMPT)
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)[0, len(ids) :]
    assert alone(llm, PROMPT, ignore_eos=True).token_ids == expected.tolist()
    assert alone(llm, PROMPT, ignore_eos=True).token_ids != alone(fw.LLM(directory), PROMPT, ignore_eos=True).token_ids


def test_weights_of_four_bits(directory, alone):
    """Against the same weights, made of their codes once and for all."""
    kept = fw.load_model(directory, quantization="nf4")
    result = alone(fw.LLM(directory, quantization="nf4"), PROMPT)
    ids = [*result.prompt_token_ids, *result.token_ids]
    rows = kept(torch.tensor([ids]))[0, len(result.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert result.token_ids == rows.argmax(-1).tolist()
    assert result.logprobs == pytest.approx(rows.max(-1).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("weights, error", [("int8_weight_only", 0.02), ("w8a8", 0.05)])
def test_weights_of_eight_bits(directory, weights, error):
    """Half of the bytes, and log-probabilities near those of bf16."""
    if not linear.available():
        with pytest.raises(UserError, match=f"inference.weights: {weights} wants a C"):
            fw.LLM(directory, dtype="bf16", weights=weights)
        return
    with pytest.raises(UserError, match=rf"inference\.weights: {weights} is of layers in bfloat16 on the CPU; set inference.dtype: bf16"):
        fw.LLM(directory, dtype="fp32", weights=weights)
    prompt = list(range(5, 45))
    whole, coded = (fw.LLM(directory, dtype="bf16", weights=each) for each in ("auto", weights))
    layers = [module for module in coded.model.modules() if isinstance(module, linear.PackedLinear)]
    assert len(layers) == 7 * len(coded.model.blocks) + (coded.model.own_head is not None)
    assert all(type(layer) is (linear.W8A8Linear if weights == "w8a8" else linear.Int8Linear) for layer in layers)
    assert coded.engine.reads.step_bytes < 0.62 * whole.engine.reads.step_bytes
    right, found = (llm.generate([prompt], max_tokens=1, temperature=0, prompt_logprobs=0)[0] for llm in (whole, coded))
    off = [abs(a - b) for a, b in zip(right.prompt_logprobs, found.prompt_logprobs, strict=True)]
    assert 0 < max(off) < error * 5 and sum(off) / len(off) < error
    few = [coded.generate([prompt[:length]], max_tokens=5, temperature=0, ignore_eos=True)[0].token_ids for length in (3, 17)]
    assert [result.token_ids for result in coded.generate([prompt[:3], prompt[:17]], max_tokens=5, temperature=0, ignore_eos=True)] == few


@pytest.mark.parametrize("kv_cache", ["paged", "contiguous"])
def test_memory_follows_use(directory, kv_cache, alone):
    """Room for 2 GiB of keys and values takes none before there are any."""
    before = anonymous_bytes()
    llm = fw.LLM(directory, kv_cache=kv_cache, kv_budget="2GiB")
    alone(llm, PROMPT, max_tokens=100)
    assert anonymous_bytes() - before < 64 << 20
    assert 0 < llm.engine.scheduler.cache.live_bytes < 1 << 20 if kv_cache == "paged" else not llm.engine.scheduler.cache.live_bytes


def test_a_context_that_does_not_fit_is_said(directory, capsys, alone):
    llm = fw.LLM(directory, kv_budget="60KiB")
    assert "fit 60 KiB, so no sequence may have more, instead of 256" in capsys.readouterr().out
    assert llm.engine.context == 60 * 1024 // (2 * 3 * 2 * 12 * 4) // 16 * 16
    assert len(alone(llm, PROMPT, max_tokens=None, ignore_eos=True).token_ids) == llm.engine.context - len(llm.encode(PROMPT))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"kv_cache": "pagde"}, "did you mean 'paged'"),
        ({"kv_cache": {"name": "paged", "block": 3}}, "unknown key 'block' in 'kv_cache'"),
        ({"kv_bugdet": "1GiB"}, "unknown key 'kv_bugdet' in 'inference'; did you mean 'kv_budget'"),
        ({"kv_budget": "100B"}, "hold no block of 16 tokens"),
        ({"max_context": 10_000}, "10000 is more than the model's own, 256"),
        ({"max_sequences": 9, "step_tokens": 8}, "9 sequences want a token each"),
        ({"device": "tpu"}, "'tpu' is no device"),
        ({"dtype": "int8"}, "inference.dtype"),
    ],
)
def test_what_cannot_be_had(directory, options, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(")):
        fw.LLM(directory, **options)


def test_settings_beside_a_sampling_are_refused(llm):
    for ask in (llm.generate, lambda *x, **more: list(llm.stream(*x, **more)), lambda *x, **more: asyncio.run(llm.agenerate(*x, **more))):
        with pytest.raises(UserError, match="give either sampling or max_tokens, not both"):
            ask("abc", llm.sampling(), max_tokens=5)


def test_what_cannot_be_asked(llm):
    for prompt, settings, said in (
        ("", {}, "the prompt has no tokens"),
        ("a" * 300, {}, "300 tokens, and prompt and answer together at most 256"),
        ([tokens.FIRST, 131], {}, "token 131, and the model has 131"),
        (PROMPT, {"temprature": 1}, "a request has no 'temprature'; did you mean 'temperature'"),
    ):
        with pytest.raises(UserError, match=said):
            llm.generate(prompt, **settings)
    with pytest.raises(UserError, match="prompt 1: the prompt has no tokens"):
        llm.generate(["abc", ""])
    assert not len(llm.engine), "nothing is left of what was refused"


def test_what_trains_is_not_imported(directory):
    """It takes seconds, which a server that begins has better uses for."""
    slow = {"pytorch_lightning", "transformers", "torch._dynamo", "torch.distributed.tensor", "sympy"}  # a second each
    code = f"import fw, sys; fw.LLM({str(directory)!r}).generate(['a'], max_tokens=6); print(sorted({slow} & {{*sys.modules}}))"
    fresh = {**os.environ, "PYTHONHASHSEED": "0"}  # a process that begins from nothing, and not from what tests have imported
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=fresh)
    assert found.stdout.splitlines()[-1] == "[]"
