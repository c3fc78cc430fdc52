"""OpenAI's own clients against the server, and the server against the model in this process."""

from __future__ import annotations

import asyncio
import json
import re

import openai
import pytest
from pydantic import BaseModel

import fw
from serving import serving

PROMPTS = ["once", "a longer prompt, of more tokens", "x"]
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a town",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["town", "days"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def llm(directory):
    return fw.LLM(directory, dtype="fp32")


@pytest.fixture(scope="module")
def client(server):
    return server.openai()


@pytest.fixture(scope="module")
def name(directory):
    return directory.name


def test_completions_are_those_of_the_model(client, llm, name):
    expected = llm.generate(PROMPTS, max_tokens=24, temperature=0, logprobs=3)
    for prompt, right in zip(PROMPTS, expected, strict=True):
        found = client.completions.create(model=name, prompt=prompt, max_tokens=24, temperature=0, logprobs=3)
        (choice,) = found.choices
        assert (choice.text, choice.finish_reason) == (right.text, right.finish_reason)
        assert choice.logprobs.token_logprobs == pytest.approx(right.logprobs, abs=1e-4)
        assert [max(top.values()) for top in choice.logprobs.top_logprobs] == pytest.approx(
            [max(top.values()) for top in right.top_logprobs], abs=1e-4
        )
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(right.prompt_token_ids), len(right.token_ids))
    several = client.completions.create(model=name, prompt=PROMPTS, max_tokens=24, temperature=0)
    assert [choice.text for choice in several.choices] == [right.text for right in expected]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    ids = [right.prompt_token_ids for right in expected]
    assert [c.text for c in client.completions.create(model=name, prompt=ids, max_tokens=24, temperature=0).choices] == [
        right.text for right in expected
    ]


def test_prompts_with_their_log_probabilities_and_no_answer(client, llm, name):
    (right,) = llm.generate(PROMPTS[1], max_tokens=0, prompt_logprobs=1)
    for _ in range(2):  # the second time the prompt is known
        (choice,) = client.completions.create(model=name, prompt=PROMPTS[1], max_tokens=0, echo=True, logprobs=1).choices
        assert choice.text == PROMPTS[1] and choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(right.prompt_logprobs, abs=1e-4)
        assert "".join(choice.logprobs.tokens) == PROMPTS[1] and choice.logprobs.text_offset == list(range(len(PROMPTS[1])))


def _told(stream):
    texts, reasons, logprobs, usage = {}, {}, {}, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
            if choice.logprobs is not None:
                told = choice.logprobs
                logprobs.setdefault(choice.index, []).extend(
                    told.token_logprobs if hasattr(told, "token_logprobs") else [one.logprob for one in told.content]
                )
    return texts, reasons, logprobs, usage


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_is_the_whole_answer_in_pieces(client, name, seed):
    """Of random bytes, so that characters are split and broken; to the byte."""
    asked = {"model": name, "prompt": ["begin", "again"], "max_tokens": 80, "seed": seed, "temperature": 1.0, "n": 2, "logprobs": 1}
    whole = client.completions.create(**asked)
    texts, reasons, logprobs, usage = _told(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        assert texts[choice.index].encode() == choice.text.encode() and reasons[choice.index] == choice.finish_reason
        assert logprobs[choice.index] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
    assert usage.completion_tokens == whole.usage.completion_tokens and len(texts) == 4
    asked = {"model": name, "messages": CHAT, "max_tokens": 80, "seed": seed, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked)
    texts, reasons, logprobs, _ = _told(client.chat.completions.create(**asked, stream=True))
    for choice in whole.choices:
        assert texts[choice.index].encode() == choice.message.content.encode() and reasons[choice.index] == choice.finish_reason
        assert logprobs[choice.index] == pytest.approx([one.logprob for one in choice.logprobs.content], abs=1e-4)
        assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)


def test_characters_of_several_bytes_and_stops_at_every_place(client, name):
    """What is said is Unicode, a byte at a time; what ends it may begin within any of its characters, and is never seen."""
    said = "é漢字😀ß—ñ"
    pattern = {"extra_body": {"regex": re.escape(said)}}
    asked = {"model": name, "prompt": "p", "max_tokens": 100, "temperature": 0, **pattern}
    assert client.completions.create(**asked).choices[0].text == said
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(pieces) == said and not any("\ufffd" in piece for piece in pieces) and len(pieces) >= len(said)
    for begin in range(len(said)):
        for end in range(begin + 1, len(said) + 1):
            stop = said[begin:end]
            whole = client.completions.create(**asked, stop=stop)
            assert (whole.choices[0].text, whole.choices[0].finish_reason) == (said[:begin], "stop")
            if (begin + end) % 3 == 0:
                pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, stop=[stop, "never"], stream=True)]
                assert "".join(pieces) == said[:begin]


def test_chats_are_those_of_the_model(client, llm, name):
    (right,) = llm.generate(CHAT, max_tokens=20, temperature=0, logprobs=2)
    found = client.chat.completions.create(
        model=name, messages=CHAT, max_completion_tokens=20, temperature=0, logprobs=True, top_logprobs=2
    )
    (choice,) = found.choices
    assert choice.message.content == right.text and choice.message.role == "assistant"
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(right.logprobs, abs=1e-4)
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode(errors="replace") == right.text
    parts = [CHAT[0], {"role": "user", "content": [{"type": "text", "text": "hello there"}]}]
    again = client.chat.completions.create(model=name, messages=parts, max_tokens=20, temperature=0)
    assert again.choices[0].message.content == right.text
    developer = [{"role": "developer", "content": "be brief"}, CHAT[1]]
    assert (
        client.chat.completions.create(model=name, messages=developer, max_tokens=20, temperature=0).choices[0].message.content
        == right.text
    )


def test_a_seed_is_kept_and_n_answers_differ(client, name):
    asked = {"model": name, "messages": CHAT, "max_tokens": 16, "seed": 5, "n": 3}
    one, other = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert texts == [choice.message.content for choice in other.choices] and len(set(texts)) == 3


def test_json_by_a_schema_and_any_json(client, name):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for stream in (False, True):
        found = client.chat.completions.create(model=name, messages=CHAT, max_tokens=200, response_format=form, seed=1, stream=stream)
        text = _told(found)[0][0] if stream else found.choices[0].message.content
        value = json.loads(text)
        assert value.keys() == {"name", "age"} and len(value["name"]) <= 5 and 0 <= value["age"] <= 99

    class Person(BaseModel):
        age: int

    parsed = client.chat.completions.parse(model=name, messages=CHAT, max_tokens=400, response_format=Person, temperature=0)
    assert parsed.choices[0].finish_reason == "length" or isinstance(parsed.choices[0].message.parsed.age, int)
    with pytest.raises(openai.BadRequestError, match="json_schema"):
        client.chat.completions.create(model=name, messages=CHAT, response_format={"type": "json_schema", "json_schema": {"name": "x"}})


@pytest.mark.parametrize(
    "choice, names", [("required", {"weather", "clock"}), ({"type": "function", "function": {"name": "weather"}}, {"weather"})]
)
def test_tools_that_must_be_called(client, name, choice, names):
    asked = {"model": name, "messages": CHAT, "tools": [WEATHER, CLOCK], "tool_choice": choice, "max_tokens": 200, "seed": 3}
    found = client.chat.completions.create(**asked).choices[0]
    (call,) = found.message.tool_calls
    assert call.function.name in names and found.finish_reason == "tool_calls" and found.message.content is None
    arguments = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert arguments.keys() == {"town", "days"} and 0 <= arguments["days"] <= 9
    calls = {}
    for chunk in client.chat.completions.create(**asked, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            kept = calls.setdefault(piece.index, ["", ""])
            kept[0] += piece.function.name or ""
            kept[1] += piece.function.arguments or ""
    assert calls == {0: [call.function.name, call.function.arguments]}
    # What was called goes back to the model, with what came of it.
    more = [*CHAT, found.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert client.chat.completions.create(model=name, messages=more, tools=[WEATHER], max_tokens=4).choices[0].finish_reason


def test_tools_that_the_model_chooses(client, name):
    """The answer is made to be a call, as the model would write it, amid other words."""
    text = 'Let me see. <tool_call>\n{"name": "weather", "arguments": {"town": "Ulm", "days": 2}}\n</tool_call>'
    asked = {"model": name, "messages": CHAT, "tools": [WEATHER, CLOCK], "max_tokens": 200, "temperature": 0}
    asked["extra_body"] = {"regex": re.escape(text)}
    found = client.chat.completions.create(**asked).choices[0]
    assert found.message.content == "Let me see." and found.finish_reason == "tool_calls"
    assert json.loads(found.message.tool_calls[0].function.arguments) == {"town": "Ulm", "days": 2}
    content, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        arguments += "".join(piece.function.arguments for piece in delta.tool_calls or ())
    assert content == "Let me see." and json.loads(arguments) == {"town": "Ulm", "days": 2}
    assert client.chat.completions.create(**{**asked, "tool_choice": "none"}).choices[0].message.content == text


@pytest.mark.parametrize(
    "change, why",
    [
        ({"model": "another"}, "does not exist"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"n": 17}, "n: 17"),
        ({"extra_body": {"bogus": 1}}, "Unrecognized request argument supplied: bogus"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "at least 1 character"),
        ({"prompt": [300]}, "token 300"),
        ({"prompt": "x" * 3000}, "3000 tokens"),
        ({"stop": ["a", ""]}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"extra_body": {"regex": "("}}, "regex"),
        ({"extra_body": {"regex": "a", "grammar": "b"}}, "one form"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(client, name, change, why):
    asked = {"model": name, "prompt": "x", "max_tokens": 1, **change}
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.NotFoundError if "model" in change else openai.BadRequestError, match=re.escape(why)):
            list(client.completions.create(**asked, **more))


def test_many_at_once_by_the_async_client(server, llm, name):
    prompts = [f"prompt number {n}" for n in range(40)]
    expected = llm.generate(prompts, max_tokens=12, temperature=0)

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(n):
                asked = {"model": name, "prompt": prompts[n], "max_tokens": 12, "temperature": 0}
                if n % 2:
                    return (await client.completions.create(**asked)).choices[0].text
                return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**asked, stream=True)])

            return await asyncio.gather(*(one(n) for n in range(len(prompts))))

    assert asyncio.run(ask()) == [right.text for right in expected]
    server.idle()


def test_embeddings_are_the_models_hidden_states(client, llm, name):
    import numpy as np

    found = client.embeddings.create(model=name, input=PROMPTS)  # the client asks for base64
    for one, mean in zip(found.data, llm.embed(PROMPTS), strict=True):
        np.testing.assert_allclose(one.embedding, np.array(mean) / np.linalg.norm(mean), atol=1e-5)
    assert found.usage.prompt_tokens == sum(len(llm.encode(prompt)) for prompt in PROMPTS)
    last = client.embeddings.create(
        model=name, input=PROMPTS[1], encoding_format="float", dimensions=7, extra_body={"pooling": "last", "normalize": False}
    )
    np.testing.assert_allclose(last.data[0].embedding, llm.embed(PROMPTS[1], pooling="last")[0][:7], atol=1e-5)


def test_tokens_there_and_back(server, llm, name):
    with server.client() as client:
        found = client.post("/tokenize", json={"prompt": "é x"}).json()
        assert found == {"count": 4, "max_model_len": 2048, "tokens": llm.encode("é x")}
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "é x"}
        assert client.post("/tokenize", json={"messages": CHAT}).json()["tokens"] == llm.encode(CHAT)
        assert client.post("/tokenize", json={"messages": CHAT, "prompt": "x"}).status_code == 400


def test_models_and_metrics(server, client, name):
    (model,) = client.models.list().data
    assert model.id == name and client.models.retrieve(name).max_model_len == 2048
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/one")
    before = _metrics(server)
    client.completions.create(model=name, prompt="y" * 40, max_tokens=5, temperature=0, extra_body={"ignore_eos": True})
    server.idle()
    after = _metrics(server)

    def more(metric, **labels):
        key = (metric, *sorted({"model_name": name, **labels}.items()))
        return after[key] - before.get(key, 0)

    assert more("vllm:generation_tokens_total") == 5 and more("vllm:prompt_tokens_total") == 40
    assert more("vllm:time_to_first_token_seconds_count") == 1 and more("vllm:inter_token_latency_seconds_count") == 4
    assert more("vllm:request_success_total", finished_reason="length") == 1
    assert after["vllm:num_requests_running", ("model_name", name)] == 0


def _metrics(server):
    from prometheus_client.parser import text_string_to_metric_families

    with server.client() as client:
        text = client.get("/metrics").text
    return {
        (sample.name, *sorted((k, v) for k, v in sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_several_engines_answer_alike(directory, llm, name):
    with serving(directory, "inference.dtype=fp32", "--replicas", "2") as server:
        expected = llm.generate(PROMPTS * 4, max_tokens=12, temperature=0)
        found = server.openai().completions.create(model=name, prompt=PROMPTS * 4, max_tokens=12, temperature=0)
        assert [choice.text for choice in found.choices] == [right.text for right in expected]
        assert server.idle()["max_sequences"] == 128
