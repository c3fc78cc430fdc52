"""`fw generate` and `fw chat` as a user types them: prompts and overrides, refusals, long conversations, how fast a file goes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest
from peft import LoraConfig, get_peft_model
from tqdm import tqdm
from transformers import AutoModelForCausalLM

import fw as library
from conftest import fw
from fw.cli import generate, main
from fw.inference import batch

GREEDY = ["--temperature", "0", "--max-tokens", "9"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def llm(directory):
    return library.LLM(directory)


@pytest.fixture
def typed(monkeypatch, capsys, directory):
    """Run a verb with the model and words; exit code, stdout and stderr."""

    def run(verb, *words, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin) if isinstance(stdin, str) else stdin)
        code = main([verb, str(directory), *map(str, words)])
        return (code, *capsys.readouterr())

    return run


@pytest.mark.parametrize("words", [["inference.dtype=fp32"], ["kv_cache=contiguous", "inference.dtype=fp32"], ["inference={dtype: fp32}"]])
def test_what_reads_as_an_override_is_one(llm, typed, words):
    (expected,) = llm.generate("the fox", temperature=0, max_tokens=9)
    assert typed("generate", *words, *GREEDY, stdin="the fox") == (0, expected.text + "\n", "")
    code, _, said = typed("generate", *words, *GREEDY, stdin=Terminal())
    assert code == 2 and "there is no prompt; give one, ahead of any key=value" in said, "whether or not there is standard input"


def test_an_override_ahead_of_standard_input_is_heard(typed):
    for word, why in (
        ("inference.dtype=bf17", "inference.dtype"),
        ("kv_cache=pagde", "did you mean 'paged'"),
        ("quantization=nf5", "did you mean 'nf4'"),
    ):
        code, out, said = typed("generate", word, stdin="the fox")
        assert (code, out) == (2, "") and why in said


@pytest.mark.parametrize(
    "prompt", ["x=1", "the = fox", "inference.", "kv_cache contiguous", "inference. All of it = that", "=", "model=llama"]
)
def test_what_else_has_an_equals_sign_is_a_prompt(llm, typed, prompt):
    (expected,) = llm.generate(prompt, temperature=0, max_tokens=9)
    assert typed("generate", prompt, *GREEDY, stdin="never read") == (0, expected.text + "\n", "")


def test_options_of_files_are_refused_without_one(typed, tmp_path):
    for words, why in (
        (["--n", "2"], "--n: several answers come with --input and --output"),
        (["--logprobs", "0"], "--logprobs: log-probabilities are written with --input and --output"),
        (["--adapters", f"a={tmp_path}"], "--adapters: lines of --input ask for these by their names; give --adapter DIR"),
    ):
        code, out, said = typed("generate", "the fox", *words)
        assert (code, out) == (2, "") and why in said
    for words in (["--n", "2"], ["--logprobs", "1"]):
        code, out, said = typed("chat", *words, stdin="who\n")
        assert (code, out) == (2, "") and f"unrecognized arguments: {' '.join(words)}" in said, "a chat has one answer, and no file"


def test_a_file_of_what_users_say(llm, typed, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    said = [{"role": "user", "content": "who"}]
    body = {"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "who", "temperature": 0, "max_tokens": 9}}
    lines = [{"prompt": "who"}, {"messages": said}, {"prompt": [5, 6]}, body]
    source.write_text("\n".join(json.dumps(line) for line in lines))
    code, _, _ = typed("generate", "--input", source, "--output", target, "--chat", *GREEDY)
    found = {each["line"]: each for each in map(json.loads, target.read_text().splitlines())}
    (chat,), (plain,) = llm.generate([said], temperature=0, max_tokens=9), llm.generate("who", temperature=0, max_tokens=9)
    assert code == 0 and found[1]["text"] == found[2]["text"] == chat.text != plain.text
    assert "is not what a user says" in found[3]["error"]
    assert found[4]["response"]["body"]["choices"][0]["text"] == plain.text, "it says by its url what it is"


@pytest.fixture
def half(typed, tmp_path, monkeypatch):
    """Run a file of two prompts; the first time it is ended before there is an answer."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "who"}\n{"prompt": "why"}\n')

    def killed(*_):
        raise RuntimeError("killed")

    def run(*words, kill=False):
        with monkeypatch.context() as patch:
            if kill:
                patch.setattr(batch, "_told", killed)
            return typed("generate", "--input", source, "--output", target, "--max-tokens", "3", *words)

    return run


def test_half_a_batch_of_another_model_is_left_alone(half):
    """Whatever answers depend on; what they do not depend on may change, so that a batch that did not fit goes on."""
    assert half(kill=True)[0] == 1
    for words, why in (
        (["inference.dtype=bf16"], "(inference.dtype: auto, and now bf16)"),
        (
            ["inference.weights=w8a8", "inference.dtype=bf16"],
            "and now bf16; inference.weights: auto, and now w8a8)",
        ),
        (["inference.max_context=20"], "(inference.max_context: none, and now 20)"),
        (["quantization=nf4"], '(quantization: none, and now {"name": "nf4"})'),
        (["kv_cache=quantized", "inference.dtype=bf16"], "kv_cache: none, and now"),
        (["--chat"], "(chat: false, and now true)"),
        (["--max-tokens", "4"], "(max_tokens: 3, and now 4)"),
    ):
        code, _, said = half(*words)
        assert code == 2 and "out.jsonl is half of another batch" in said and why in said, said
    assert half("inference.max_sequences=1", "inference.kv_budget=1MiB", "inference.replay=false")[0] == 0


def test_half_a_batch_of_weights_that_have_changed_is_left_alone(half, directory, typed):
    """Under the same name, as a run's latest checkpoint has them."""
    assert half(kill=True)[0] == 1
    weights = next(directory.glob("*.safetensors"))
    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    code, _, said = half()
    assert code == 2 and "half of another batch (files of the model: /" in said, said
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert half()[0] == 0


def test_a_prompt_may_stand_after_options(llm, typed):
    (expected,) = llm.generate("the = fox", temperature=0, max_tokens=9)
    assert typed("generate", *GREEDY, "the = fox", stdin="never read") == (0, expected.text + "\n", "")
    assert typed("generate", *GREEDY, "the = fox", "inference.dtype=fp32") == (0, expected.text + "\n", "")
    code, _, said = typed("generate", *GREEDY, "the fox", "jumps")
    assert code == 2 and "unrecognized arguments: jumps" in said


def test_half_a_batch_of_other_adapters_is_left_alone(half, directory, tmp_path):
    for name in "ab":
        config = LoraConfig(r=2, target_modules=["q_proj"])
        get_peft_model(AutoModelForCausalLM.from_pretrained(directory), config).save_pretrained(tmp_path / name)
    a, b = tmp_path / "a", tmp_path / "b"
    assert half("--adapter", a, "--adapters", f"legal={a}", kill=True)[0] == 1
    for words, why in (
        (["--adapter", b, "--adapters", f"legal={a}"], "(adapter: /"),
        (["--adapters", f"legal={a}"], "and now none)"),
        (["--adapter", a, "--adapters", f"legal={b}"], "(adapters legal: /"),
        (["--adapter", a, "--adapters", f"legal={a}", "--adapters", f"more={b}"], "(adapters more: none, and now /"),
    ):
        code, _, said = half(*words)
        assert code == 2 and "half of another batch" in said and why in said, said
    assert half("--adapter", f"{a}/", "--adapters", f"legal={a}")[0] == 0


def conversation(llm, said, system, room):
    """What a chat answers, by hand: the oldest pairs left out while prompt and room are more than the context; and how many."""
    turns, answers, left_out = [], [], []
    for words in said:
        turns.append({"role": "user", "content": words})
        before = len(turns)
        while len(llm.encode([*system, *turns])) + room > llm.engine.context:
            turns = turns[2:]
        left_out += [before - len(turns)] if len(turns) < before else []
        (answer,) = llm.generate([[*system, *turns]], temperature=0, max_tokens=9)
        answers.append(answer.text)
        turns.append({"role": "assistant", "content": answer.text})
    return answers, left_out


@pytest.mark.parametrize("system", [None, "short"])
def test_a_conversation_longer_than_the_context(directory, typed, system):
    llm = library.LLM(directory, max_context=60)
    said = [f"who is {name}" for name in ("ann", "ben", "cem", "dora", "eve", "fay")]
    words = [*GREEDY, "inference.max_context=60", *(["--system", system] if system else [])]
    answers, left_out = conversation(llm, said, [{"role": "system", "content": system}] if system else [], room=9)
    assert len(left_out) >= 2, "several times in this conversation"
    code, out, told = typed("chat", *words, stdin="\n".join(said))
    assert code == 0 and out == "".join(f"{answer}\n" for answer in answers)
    assert [line for line in told.splitlines() if "context" in line] == [
        f"fw: warning: the conversation is longer than the context; its oldest {count} messages are left out" for count in left_out
    ]


def test_a_message_longer_than_the_context_harms_no_other(directory, typed):
    llm = library.LLM(directory, max_context=60)
    answers, _ = conversation(llm, ["who", "why"], [], room=9)
    code, out, told = typed("chat", *GREEDY, "inference.max_context=60", stdin=f"who\n{'too long ' * 60}\nwhy\n")
    assert code == 2 and out == "".join(f"{answer}\n" for answer in answers)
    assert "what was said takes" in told and "have 60; say it in fewer words" in told and "left out" not in told


def test_a_wrong_option_ends_a_chat_before_it_begins(typed):
    code, out, told = typed("chat", "--top-p", "7", stdin=Terminal())
    assert (code, out) == (2, "") and "top_p: 7.0 is not between 0 and 1" in told


def test_rates_by_hand():
    assert generate._rates(12_800, 2.0, 0, 0) == "6,400 tokens/s"
    assert generate._rates(30, 40.0, 123, 0) == "1 tokens/s"
    assert generate._rates(12_800, 2.0, 151_000_000_000, 204.8e9) == "6,400 tokens/s, 75.5 of 204.8 GB/s"


def test_the_bar_of_a_file(directory, tmp_path, monkeypatch):
    """What it shows is of what was read: in each step all weights but those looked up, and keys and values."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": [5, 6, 7]}\n{"prompt": [8, 9]}\n')
    shown, now, stderr = [], [1000.0], Terminal()

    def rates(tokens, seconds, read_bytes, most, _own=generate._rates):
        shown.append((tokens, read_bytes, most))
        now[0] += 2  # of the bar's clock: longer than it waits before it shows anything
        return _own(tokens, 4.0, read_bytes, most)

    monkeypatch.setattr(generate, "_rates", rates)
    monkeypatch.setattr("fw.meter.bandwidth.read_bandwidth", lambda device: 25e9)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("sys.stderr", stderr)
    words = ["generate", str(directory), "--input", str(source), "--output", str(target), "--max-tokens", "4", "--ignore-eos"]
    assert main([*words, "inference.max_sequences=1", "inference.dtype=fp32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(directory)
    config = model.config
    weights = 4 * sum(each.numel() for name, each in model.named_parameters() if "embed_tokens" not in name)
    token = 4 * config.num_hidden_layers * 2 * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    attended = sum((3, 4, 5, 6)) + sum((2, 3, 4, 5))
    assert shown[-1][0] == 8 and [each[:2] for each in shown[:1]] == [(0, 0)]
    during = [each for each in shown if each[2]]
    assert during[-1] == (8, 8 * weights + attended * token, 25e9)
    assert "1/2 [" in stderr.getvalue() and "1 tokens/s, 0.0 of 25.0 GB/s" in stderr.getvalue()


def test_the_bar_of_half_a_file(directory, tmp_path, monkeypatch):
    """Lines of before are done, and say nothing of how long the others take."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "who"}\n' * 4)
    words = ["generate", str(directory), "--input", str(source), "--output", str(target), "--max-tokens", "2", "inference.max_sequences=1"]
    told, now, said = batch._told, [1000.0], []

    def killed(llm, line, *more):
        if line.number == 3:
            raise RuntimeError("killed")
        return told(llm, line, *more)

    with monkeypatch.context() as patch:
        patch.setattr(batch, "_told", killed)
        assert main(words) == 1 and len(target.read_text().splitlines()) == 2

    def rates(*figures, _own=generate._rates):
        now[0] += 20
        return _own(*figures)

    class Stderr(io.StringIO):
        def write(self, text):
            said.append((now[0] - 1000.0, text))
            return len(text)

    monkeypatch.setattr(generate, "_rates", rates)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    monkeypatch.setattr("sys.stderr", Stderr())
    assert main(words) == 0
    (seconds,) = {seconds for seconds, text in said if text.startswith("generating: 75%, 3 of 4 lines, ")}
    assert any(text.startswith(f"generating: 75%, 3 of 4 lines, {tqdm.format_interval(seconds)} left") for _, text in said)


def test_the_terminal(directory, tmp_path):
    llm = library.LLM(directory)
    (expected,) = llm.generate("the fox", temperature=0, max_tokens=9)
    given = ["--temperature", "0", "--max-tokens", "9"]
    assert fw("generate", str(directory), "the fox", *given).ok().out == expected.text + "\n"
    assert fw("generate", str(directory), "the fox", *given, "kv_cache=contiguous", "inference.dtype=fp32").ok().out == expected.text + "\n"
    (chat,) = llm.generate([{"role": "user", "content": "who"}], temperature=0, max_tokens=9)
    assert fw("generate", str(directory), "who", "--chat", *given).ok().out == chat.text + "\n"
    for words, said in (
        (["the fox", "--top-p", "7"], "top_p: 7.0 is not between 0 and 1"),
        (["the fox", "kv_cache=pagde"], "did you mean 'paged'"),
        (["the fox", "train.max_steps=3"], "section 'train' means nothing here; it is a training run's; give it to fw train"),
        (["--input", "nothing.jsonl"], "--input and --output go together"),
        (["--input", "nothing.jsonl", "--output", str(tmp_path / "o")], "nothing.jsonl cannot be read"),
        (["the fox", "--n", "2"], "several answers come with --input"),
    ):
        found = fw("generate", str(directory), *words)
        assert found.code == 2 and said in found.err, found.err
    none = fw("generate", str(tmp_path / "nowhere"), "a")
    assert none.code == 2 and "no such directory" in none.err


def test_talking(directory):
    llm = library.LLM(directory)
    first = [{"role": "user", "content": "who"}]
    (one,) = llm.generate(first, temperature=0, max_tokens=9)
    second = [*first, {"role": "assistant", "content": one.text}, {"role": "user", "content": "why"}]
    (two,) = llm.generate(second, temperature=0, max_tokens=9)
    found = subprocess.run(
        [sys.executable, "-m", "fw", "chat", str(directory), "--temperature", "0", "--max-tokens", "9"],
        input="who\n\nwhy\n/new\nwho\n/exit\nwho\n",
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0 and found.stdout == f"{one.text}\n{two.text}\n{one.text}\n", found.stderr
