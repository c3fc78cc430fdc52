"""Files of prompts and answers: both formats, bad lines, and going on after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import fw as library
from conftest import fw
from fw.errors import UserError
from fw.inference.batch import run_batch
from fw.inference.openai import asked

GOOD = [
    {"prompt": "the quick brown fox", "id": "fox"},
    {"prompt": "a", "max_tokens": 3, "logprobs": 2, "n": 2, "temperature": 1.0, "seed": 3},
    {"messages": [{"role": "user", "content": "who"}], "prompt_logprobs": 0},
    {
        "custom_id": "first",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "x",
            "messages": [{"role": "user", "content": "who"}],
            "max_completion_tokens": 7,
            "logprobs": True,
            "top_logprobs": 2,
            "temperature": 0,
            "ignore_eos": True,
        },
    },
    {
        "custom_id": "second",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "x", "prompt": "who", "max_tokens": 4, "logprobs": 1, "echo": True, "temperature": 0},
    },
]
BAD = [
    ("{not json", "not JSON"),
    ('["a"]', "not a JSON object"),
    ('{"text": "a"}', "either 'prompt', or 'messages'"),
    ('{"prompt": "a", "temprature": 1}', "a request has no 'temprature'"),
    ('{"prompt": "a", "temperature": "hot"}', "'hot' is no number"),
    ('{"prompt": 5}', "a prompt is a text"),
    ('{"prompt": ""}', "no tokens"),
    ('{"prompt": [true]}', "a prompt is a text"),
    ('{"prompt": "a", "adapter": ["x"]}', "adapter: ['x'] is no name"),
    ('{"prompt": "a", "adapter": 5}', "adapter: 5 is no name"),
    ('{"prompt": "a", "adapter": "x"}', "there is no adapter 'x'"),
    ('{"messages": "hello"}', "messages: 'hello' is no list of messages"),
    ('{"messages": [1, 2]}', "messages: [1, 2] is no list of messages"),
    ('{"messages": []}', "messages: [] is no list of messages"),
    ('{"messages": [{"content": "a"}]}', "is no list of messages"),
    ('{"prompt": "a", "logit_bias": {"3": 1%s}}' % ("0" * 400), "no object of token ids"),
    ('{"prompt": "a", "temperature": 1%s}' % ("0" * 400), "is more than fp32 holds"),
    ('{"prompt": "a", "stop_token_ids": [true]}', "no list of token ids"),
    ('{"custom_id": "q", "url": "/v1/chat/completions", "body": {"messages": "hello"}}', "messages: 'hello' is no list of messages"),
    ('{"custom_id": "q", "url": "/v1/chat/completions", "body": {"messages": [1, 2]}}', "messages: [1, 2] is no list of messages"),
    ('{"prompt": "a", "self": 1}', "a request has no 'self'"),
    ('{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}', "parts that are no text"),
    ('{"messages": [{"role": "user", "content": 5}]}', "content 5 is neither a text nor a list"),
    (
        '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
        "the arguments of a call are no JSON: {",
    ),
    ('{"custom_id": "q", "url": "/v1/embeddings", "body": {}}', "neither /v1/chat/completions nor"),
    ('{"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "a", "tools": []}}', "'tools' is not honoured"),
    ('{"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "a", "logit_bias": 5}}', "no object of token ids"),
]


KILLED = """
import os, signal, sys
from fw.inference import batch
write, count = batch._write, 0
def writes(out, told):
    global count
    write(out, told)
    count += 1
    if count == 10:
        os.kill(os.getpid(), signal.SIGKILL)
batch._write = writes
from fw.cli import main
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def llm(directory):
    return library.LLM(directory, dtype="fp32")


def written(path: Path, lines: list[object]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def answers(path: Path) -> dict[int, dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["line"] for one in found}) == len(found), "a line answered twice"
    return {one["line"]: one for one in found}


def test_lines_of_both_formats(llm, tmp_path):
    target = tmp_path / "out" / "answers.jsonl"
    progress = run_batch(
        llm, written(tmp_path / "in.jsonl", ["", *GOOD]), target, {"temperature": 0, "max_tokens": 9}, "small", lambda p: None
    )
    found = answers(target)
    assert sorted(found) == [2, 3, 4, 5, 6] and (progress.done, progress.failed) == (5, 0), "numbers are those of the file"
    (expected,) = llm.generate("the quick brown fox", temperature=0, max_tokens=9)
    assert found[2] == {
        "line": 2,
        "id": "fox",
        "text": expected.text,
        "token_ids": expected.token_ids,
        "finish_reason": "length",
        "logprobs": pytest.approx(expected.logprobs, abs=1e-5),
    }
    assert len(found[3]["token_ids"]) == 3 and len(found[3]["others"]) == 1 and len(found[3]["top_logprobs"][0]) == 2
    (chat,) = llm.generate([{"role": "user", "content": "who"}], temperature=0, max_tokens=9)
    assert found[4]["text"] == chat.text and len(found[4]["prompt_logprobs"]) == len(chat.prompt_token_ids) - 1
    first = found[5]
    assert (first["custom_id"], first["error"], first["response"]["status_code"]) == ("first", None, 200)
    body = first["response"]["body"]
    assert body["object"] == "chat.completion" and body["model"] == "small" and body["usage"]["completion_tokens"] == 7
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == body["choices"][0]["message"]["content"]
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    text = found[6]["response"]["body"]["choices"][0]
    (plain,) = llm.generate("who", temperature=0, max_tokens=4)
    (prompt,) = llm.generate("who", max_tokens=0, prompt_logprobs=0)
    first, *rest = text["logprobs"]["token_logprobs"]
    assert text["text"] == "who" + plain.text and first is None
    assert rest == pytest.approx([*prompt.prompt_logprobs, *plain.logprobs], abs=1e-5)
    assert text["logprobs"]["text_offset"] == list(range(len(text["text"])))
    assert progress.tokens == sum(len(found[n]["token_ids"]) for n in (2, 3, 4)) + 3 + 7 + 4


@pytest.mark.parametrize("bad, why", BAD, ids=[why for _, why in BAD])
def test_a_bad_line_is_kept_and_harms_nobody(llm, tmp_path, bad, why):
    target = tmp_path / "answers.jsonl"
    progress = run_batch(llm, written(tmp_path / "in.jsonl", [GOOD[0], bad, GOOD[0]]), target, {"max_tokens": 2}, "small", lambda p: None)
    found = answers(target)
    assert (progress.done, progress.failed) == (3, 1) and "text" in found[1] and "text" in found[3]
    if "body" in bad:
        assert why in found[2]["error"]["message"] and found[2]["custom_id"] == "q" and found[2]["response"] is None
    else:
        assert why in found[2]["error"]
        kept = found[2]["input"]
        assert kept == (json.loads(bad) if bad.startswith("{") and "not" not in bad[:5] else bad)


@pytest.mark.parametrize("levels", [101, 400, 2000, 200_000])
@pytest.mark.parametrize("around", ["%s", '{"prompt": %s}', '{"custom_id": "q", "url": "/v1/completions", "body": {"prompt": %s}}'])
def test_a_line_that_is_too_deep(llm, tmp_path, around, levels):
    bad, target = around % ("[" * levels + "]" * levels), tmp_path / "answers.jsonl"
    run_batch(llm, written(tmp_path / "in.jsonl", [bad, GOOD[0]]), target, {"max_tokens": 2}, "small", lambda p: None)
    found = answers(target)
    assert found[1]["input"] == bad and "text" in found[2]
    assert ("100 deep" if around != "%s" or levels > 900 else "not a JSON object") in found[1]["error"]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([10**400, -(10**400), 2**63]) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.sampled_from(["1", "role", "type"]), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]) | ANY, "content": st.text(max_size=4) | ANY}), max_size=2
)
NUMBERS = [
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "n", "best_of", "logprobs", "prompt_logprobs", "prompt_logprobs_from"),
]
REST = ["logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "json_schema", "regex", "grammar"]
SETTINGS = st.dictionaries(
    st.sampled_from(NUMBERS), st.integers(0, 3) | st.floats(0, 2) | st.sampled_from([10**400, 1e39, 1e-320, -1, True]) | ANY, max_size=4
).flatmap(lambda numbers: st.dictionaries(st.sampled_from([*REST, "id", "adapter"]), ANY, max_size=2).map(lambda rest: {**numbers, **rest}))
PROMPT = st.text(max_size=4) | st.lists(st.integers(0, 40), max_size=4) | MESSAGES | ANY
OWN = st.builds(lambda kind, prompt, more: {**more, kind: prompt}, st.sampled_from(["prompt", "messages"]), PROMPT, SETTINGS)
OPENAIS = st.builds(
    lambda url, prompt, settings, more: {
        "custom_id": "q",
        "url": url,
        "body": {"prompt" if "chat" not in url else "messages": prompt, **settings, **more},
    },
    st.sampled_from(["/v1/chat/completions", "/v1/completions"]),
    PROMPT,
    SETTINGS,
    st.dictionaries(
        st.sampled_from(["model", "echo", "top_logprobs", "response_format", "stream", "max_completion_tokens", "user"]), ANY, max_size=2
    ),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lines=st.lists(OWN | OPENAIS | ANY, min_size=1, max_size=4), chat=st.booleans())
def test_no_line_ends_a_batch(llm, tmp_path_factory, lines, chat):
    place = tmp_path_factory.mktemp("fuzz")
    source, target = written(place / "in.jsonl", [json.dumps(line) for line in lines]), place / "answers.jsonl"
    run_batch(llm, source, target, {"max_tokens": 2}, "small", lambda p: None, chat=chat)
    assert sorted(answers(target)) == list(range(1, 1 + len(lines))) and not len(llm.engine)


def test_a_line_that_is_no_text(llm, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "\xff"}\n{"prompt": "a"}\n')
    run_batch(llm, source, tmp_path / "out", {"max_tokens": 2}, "small", lambda p: None)
    found = answers(tmp_path / "out")
    assert "error" in found[1] and "text" in found[2]


def test_settings_are_of_lines_that_do_not_say(llm, tmp_path):
    """Of both formats; what a line says goes first."""
    bodies = [{"prompt": "who"}, {"prompt": "who", "max_tokens": 3, "logprobs": None}, {"prompt": "who", "logprobs": 0, "temperature": 1.5}]
    lines = [{"custom_id": str(n), "url": "/v1/completions", "body": body} for n, body in enumerate(bodies)]
    given = {"temperature": 0, "max_tokens": 30, "logprobs": 2, "seed": 5, "ignore_eos": True}
    run_batch(llm, written(tmp_path / "in.jsonl", lines), tmp_path / "out", given, "small", lambda p: None)
    first, short, own = (found["response"]["body"]["choices"][0] for _, found in sorted(answers(tmp_path / "out").items()))
    (expected,), (drawn,) = llm.generate("who", **given), llm.generate("who", **{**given, "temperature": 1.5})
    assert (first["text"], short["text"], own["text"]) == (expected.text, expected.text[:3], drawn.text)
    assert len(first["logprobs"]["top_logprobs"][0]) == 2 and own["logprobs"]["token_logprobs"]
    bare = [{"custom_id": "0", "url": "/v1/completions", "body": {"prompt": "who", "ignore_eos": True}}]
    run_batch(llm, written(tmp_path / "bare.jsonl", bare), tmp_path / "bare", {"temperature": 0}, "small", lambda p: None)
    assert answers(tmp_path / "bare")[1]["response"]["body"]["usage"]["completion_tokens"] == 16, "OpenAI's, where nobody says"


@pytest.mark.parametrize("own", [{"regex": "[a-c]"}, {"json_schema": {}}, {"response_format": {"type": "json_object"}}])
def test_an_answer_has_one_form_which_a_line_may_say(llm, own):
    given = {"regex": "[x-z]", "temperature": 0}
    found = asked(llm, "/v1/completions", {"prompt": "a", **own}, given).sampling
    assert found.regex == own.get("regex") and (found.json_schema is not None) == ("regex" not in own) and found.temperature == 0
    assert asked(llm, "/v1/completions", {"prompt": "a"}, given).sampling.regex == "[x-z]"


def test_messages_are_as_over_http(llm, tmp_path):
    parts = [{"type": "text", "text": "who"}, {"type": "text", "text": "is"}]
    lines = [
        {"messages": [{"role": "developer", "content": "brief"}, {"role": "user", "content": parts}]},
        {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": parts}], "max_tokens": 5}},
        {"messages": [{"role": "assistant", "content": None}, {"role": "user", "content": "a"}]},
    ]
    run_batch(llm, written(tmp_path / "in.jsonl", lines), tmp_path / "out", {"temperature": 0, "max_tokens": 5}, "small", lambda p: None)
    found = answers(tmp_path / "out")
    same = ([("system", "brief"), ("user", "who\nis")], [("user", "who\nis")], [("assistant", ""), ("user", "a")])
    said = [llm.generate([{"role": role, "content": text} for role, text in each], temperature=0, max_tokens=5)[0].text for each in same]
    assert [found[1]["text"], found[2]["response"]["body"]["choices"][0]["message"]["content"], found[3]["text"]] == said


def test_all_that_was_asked_for_is_written(llm, tmp_path):
    line = {
        "prompt": "abc",
        "n": 2,
        "temperature": 1.0,
        "seed": 1,
        "logprobs": 3,
        "prompt_logprobs": 2,
        "max_tokens": 4,
        "ignore_eos": True,
    }
    run_batch(llm, written(tmp_path / "in.jsonl", [line]), tmp_path / "out", {}, "small", lambda p: None)
    found = answers(tmp_path / "out")[1]
    assert [len(each) for each in found["prompt_top_logprobs"]] == [2, 2]
    (other,) = found["others"]
    assert len(other["logprobs"]) == 4 and [len(each) for each in other["top_logprobs"]] == [3] * 4


def test_lines_are_those_that_editors_count(llm, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt":\r"b"}\n\xc2\xa0\n{"prompt": "c"}')
    progress = run_batch(llm, source, tmp_path / "out", {"max_tokens": 2}, "small", lambda p: None)
    found = answers(tmp_path / "out")
    assert sorted(found) == [1, 3, 4, 5] and progress.lines == progress.done == 4
    assert [number for number, one in found.items() if "error" in one] == [4], "white space of Unicode's is a line"


def test_what_can_be_read_once_only_is_refused(llm, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="can be read once only"):
        run_batch(llm, pipe, tmp_path / "out", {}, "small", lambda p: None)
    assert not (tmp_path / "out").exists()


def test_an_input_that_changes_meanwhile_is_said(llm, tmp_path):
    source, target = written(tmp_path / "in.jsonl", GOOD[:1]), tmp_path / "out"

    def grow(progress):
        if not progress.done:
            written(source, GOOD[:2])

    with pytest.raises(UserError, match="has other lines than when the batch began"):
        run_batch(llm, source, target, {"max_tokens": 2}, "small", grow)


def test_two_do_not_write_one_file(llm, tmp_path):
    source, target, seen = written(tmp_path / "in.jsonl", GOOD[:1]), tmp_path / "out", []

    def again(progress):
        with pytest.raises(UserError, match="another process is writing") as error:
            run_batch(llm, source, target, {"max_tokens": 2}, "small", lambda p: None)
        seen.append(error)

    run_batch(llm, source, target, {"max_tokens": 2}, "small", again)
    assert seen and len(answers(target)) == 1 and [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


def test_a_line_of_somebody_else_among_answers_is_said(llm, tmp_path):
    source, target = written(tmp_path / "in.jsonl", GOOD[:2]), tmp_path / "out"

    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, source, target, {"max_tokens": 2}, "small", stop)
    for odd in ("\n", "{}\n", "[1]\n", "no JSON\n"):
        target.write_text(odd)
        with pytest.raises(UserError, match=r"line 1 of .* is no answer of a batch; remove that line"):
            run_batch(llm, source, target, {"max_tokens": 2}, "small", lambda p: None)
        assert target.read_text() == odd


def test_going_on_after_a_kill(directory, tmp_path):
    """Killed in the middle of a line, at any moment: what was answered is not asked again, nothing is missing."""
    source = written(tmp_path / "in.jsonl", [{"prompt": "abcdefgh"[: 1 + n % 8], "max_tokens": 5 + n % 40} for n in range(60)])
    target = tmp_path / "answers.jsonl"
    command = ["generate", str(directory), "--input", str(source), "--output", str(target)]
    command += ["--temperature", "0", "--ignore-eos", "inference.max_sequences=4"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *command], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = target.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    kept = whole.count(b"\n")
    assert kept == 10
    target.write_bytes(whole + b'{"line": 99, "text": "half of')
    out = fw(*command).ok().out
    assert f"{60 - kept} answers" in out and f"{kept} from before" in out
    assert target.read_bytes().startswith(whole), "what was there stays"
    found = answers(target)
    assert sorted(found) == list(range(1, 61))
    llm = library.LLM(directory)
    for number in (1, 30, 60):
        expected = llm.generate("abcdefgh"[: 1 + (number - 1) % 8], temperature=0, max_tokens=5 + (number - 1) % 40, ignore_eos=True)
        assert found[number]["token_ids"] == expected[0].token_ids
    again = fw(*command)
    assert again.code == 2 and "exists already" in again.err, "it is whole now"


def test_half_of_another_batch_is_left_alone(llm, tmp_path):
    source, target = written(tmp_path / "in.jsonl", GOOD[:1]), tmp_path / "answers.jsonl"

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_batch(llm, source, target, {"max_tokens": 4, "logit_bias": {5: 1.0}}, "small", stop)
    assert not len(llm.engine)

    def again(model="small", **more):
        return run_batch(llm, source, target, {"max_tokens": 4, "logit_bias": {5: 1.0}, **more}, model, lambda p: None)

    schemas = '(logit_bias: {"5": 1.0}, and now {}; json_schema: none, and now {"type": "integer"})'
    for ask, why in (
        (lambda: again(max_tokens=5), "(max_tokens: 4, and now 5)"),
        (lambda: again(logit_bias={5: 2.0}), '(logit_bias: {"5": 1.0}, and now {"5": 2.0})'),
        (lambda: again(logit_bias={}, json_schema={"type": "integer"}), schemas),
        (lambda: again("other"), "(model: small, and now other)"),
    ):
        with pytest.raises(UserError, match=f"half of another batch {re.escape(why)}; ask as that did, or remove it and"):
            ask()
    before = source.read_text()
    written(source, GOOD[:2])
    with pytest.raises(UserError, match=r"half of another batch \(other prompts\)"):
        again()
    source.write_text(before)
    assert again(logit_bias={"5": 1}).done == 1, "the same, as JSON has it"


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


def test_a_draft_guesses_for_a_file(directory, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "hello"}\n{"prompt": "who"}\n')
    words = ["generate", directory, "--input", source, "--output", target, "--temperature", "0", "--max-tokens", "21", "--ignore-eos"]
    told = fw(*words, f"inference.draft={directory}", "inference.speculate=4", "inference.dtype=bf16").ok()
    assert "2 answers, 42 tokens" in told.out and "; 32 of 32 guesses were right" in told.out
