"""Files of prompts and answers: both formats, bad lines, and going on after a kill."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings, strategies as st

from batch_lines import answers, written
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
