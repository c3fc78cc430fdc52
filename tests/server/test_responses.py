"""The Responses interface: OpenAI's own client against the server, and the events one by one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from itertools import islice
from typing import Annotated, Literal

import openai
import pydantic
import pytest
from hypothesis import given, settings, strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, ConfigDict, Field

import fw
from fw.server.errors import ApiError
from fw.server.response_schemas import ResponseBody, ResponseRequest
from fw.server.responses import Answer
from fw.server.tool_calls import Call, Content
from serving import Server, until

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a town",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "maxLength": 5}},
        "required": ["town"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    },
}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
ULM, NOW = '{"name": "weather", "arguments": {"town": "Ulm"}}', '{"name": "clock", "arguments": {}}'
CALLS = f"Let me see. <tool_call>\n{ULM}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call> So be it."
LOGPROBS = ["message.output_text.logprobs"]
TOKEN = {"token": "t", "logprob": -1.0, "bytes": [116], "top_logprobs": []}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


class Person(BaseModel):
    model_config = ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})

    name: Literal["Ann", "Bo"]
    age: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def llm(directory):
    return fw.LLM(directory, dtype="fp32")


@pytest.fixture(scope="module")
def client(server):
    return server.openai()


def told(text):
    """The events of a stream, each with its name."""
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def check(events):
    """That they tell of a response as they must; gives it."""
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
    for each in events:
        EVENT.validate_python(each)
    for each in events[:2]:
        ResponseBody.model_validate(each["response"])
        assert (each["response"]["status"], each["response"]["output"], each["response"]["usage"]) == ("in_progress", [], None)
    made, ended, last = [], 0, events[-1]
    for each in events[2:-1]:
        kind, index = each["type"].removeprefix("response."), each["output_index"]
        if kind == "output_item.added":
            assert index == len(made) == ended
            made.append({**each["item"], "written": "", "logprobs": []})
            continue
        assert index == ended == len(made) - 1
        item = made[index]
        if kind == "output_item.done":
            kept = {name: value for name, value in item.items() if name not in ("written", "logprobs")}
            assert each["item"] == {**kept, "status": each["item"]["status"]} and each["item"]["status"] != "in_progress"
            made[index] = each["item"]
            ended += 1
            continue
        assert each["item_id"] == item["id"]
        if kind == "content_part.added":
            assert item["content"] == [] and each["part"]["text"] == ""
        elif kind == "output_text.delta":
            item["written"] += each["delta"]
            item["logprobs"] += each["logprobs"]
        elif kind == "output_text.done":
            assert (each["text"], each["logprobs"]) == (item["written"], item["logprobs"])
        elif kind == "content_part.done":
            part = {"type": "output_text", "text": item["written"], "annotations": [], "logprobs": item["logprobs"]}
            assert each["part"] == part
            item["content"] = [part]
        elif kind == "function_call_arguments.delta":
            item["written"] += each["delta"]
        else:
            assert kind == "function_call_arguments.done" and each["arguments"] == item["written"] and each["name"] == item["name"]
            item["arguments"] = each["arguments"]
    assert ended == len(made) and last["type"] == f"response.{last['response']['status']}" and last["response"]["output"] == made
    ResponseBody.model_validate(last["response"])
    Response.model_validate(last["response"])
    return last["response"]


def alike(response):
    """All of a response but for what is its own: ids and times."""
    kept = {name: value for name, value in response.items() if name not in ("id", "created_at", "completed_at")}
    own = ("id", "call_id")
    return {**kept, "output": [{name: value for name, value in item.items() if name not in own} for item in response["output"]]}


def both(server, **asked):
    """The answer, which a stream tells, too."""
    with server.client() as http:
        whole, stream = http.post("/v1/responses", json=asked), http.post("/v1/responses", json={**asked, "stream": True})
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text + stream.text
    response, streamed = whole.json(), check(told(stream.text))
    ResponseBody.model_validate(response)
    Response.model_validate(response)
    # The second one finds the prompt in the cache.
    assert response["usage"].pop("input_tokens_details").keys() == streamed["usage"].pop("input_tokens_details").keys()
    assert json.dumps(alike(response)) == json.dumps(alike(streamed))
    return response


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.builds(Content, st.text()), st.builds(Call, st.just(0), st.uuids().map(str), st.just("f"), st.text()))),
    st.sampled_from(["completed", "incomplete", "failed"]),
)
def test_events_tell_the_response(pieces, end):
    head = {"text": {}, "model": "m", "tools": [], "tool_choice": "auto", "instructions": None, "max_output_tokens": None}
    head |= {"temperature": 1.0, "top_p": 1.0, "top_logprobs": 0, "parallel_tool_calls": True, "reasoning": {}, "truncation": "disabled"}
    head |= {"metadata": {}, "user": None, "safety_identifier": None, "prompt_cache_key": None, "service_tier": "default"}
    answer = Answer({**head, "store": False, "background": False, "previous_response_id": None})
    events = answer.begin()
    for piece in pieces:
        events += answer.call(piece) if isinstance(piece, Call) else answer.say(piece.text, [TOKEN][: len(piece.text)])
    used = {"input_tokens": 1, "output_tokens": 2, "total_tokens": 3, "output_tokens_details": {"reasoning_tokens": 0}}
    used["input_tokens_details"] = {"cached_tokens": 0, "cache_write_tokens": 0}
    events += answer.fail(ApiError(500, "it is no more")) if end == "failed" else answer.finish(end == "completed", used)
    response = check(told(b"".join(events).decode()))
    assert response == answer.body and response["status"] == end
    assert (response["completed_at"] is not None) == (end == "completed")
    assert (response["incomplete_details"] is not None) == (end == "incomplete")
    assert response["error"] == ({"code": "server_error", "message": "it is no more"} if end == "failed" else None)
    calls = [piece for piece in pieces if isinstance(piece, Call)]
    assert [item["call_id"] for item in response["output"] if item["type"] == "function_call"] == [call.id for call in calls]
    said = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    assert "".join(said) == "".join(piece.text for piece in pieces if isinstance(piece, Content))
    assert all(said) or response["output"] == response["output"][:1]
    if end == "completed":
        assert response["output"] and all(item["status"] == "completed" for item in response["output"])


def test_it_is_what_the_model_says(server, client, llm, directory):
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
    (right,) = llm.generate(chat, max_tokens=20, temperature=0)
    parts = [{"type": "input_text", "text": "hello there"}]
    for asked in (
        {"instructions": "be brief", "input": "hello there"},
        {"instructions": "be brief", "input": [{"role": "user", "content": parts}]},
        {"input": [{"type": "message", "role": "developer", "content": "be brief"}, {"type": "message", **chat[1]}]},
    ):
        found = client.responses.create(model=directory.name, **asked, max_output_tokens=20, temperature=0, store=False)
        assert found.output_text == right.text and found.output[0].role == "assistant"
        assert (found.usage.input_tokens, found.usage.output_tokens) == (len(right.prompt_token_ids), len(right.token_ids))
        assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    whole = right.finish_reason == "stop"
    assert found.status == found.output[0].status == ("completed" if whole else "incomplete")
    told = client.responses.create(input="x", max_output_tokens=2, metadata={"a": "b"}, user="me", extra_body={"ignore_eos": True})
    assert told.status == "incomplete" and told.incomplete_details.reason == "max_output_tokens"
    assert (told.metadata, told.user, told.model, told.store) == ({"a": "b"}, "me", directory.name, False)
    ended = both(server, input="x", regex="yes")
    assert ended["status"] == "completed" and ended["output"][0]["content"][0]["text"] == "yes"
    assert ended["completed_at"] >= ended["created_at"] and ended["output"][0]["status"] == "completed"
    assert both(server, input="x", regex="")["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_is_the_whole_answer_in_pieces(server, client, seed):
    """Of random bytes, so that characters are split and broken."""
    both(server, input="begin", max_output_tokens=60, seed=seed, temperature=1.0)
    found = both(server, input="begin", max_output_tokens=30, seed=seed, include=LOGPROBS, top_logprobs=2)
    (part,) = found["output"][0]["content"]
    assert len(part["logprobs"]) == found["usage"]["output_tokens"] and all(len(one["top_logprobs"]) == 2 for one in part["logprobs"])
    assert b"".join(bytes(one["bytes"]) for one in part["logprobs"]).decode(errors="replace").startswith(part["text"])
    asked = {"input": "begin", "max_output_tokens": 30, "extra_body": {"seed": seed}}
    deltas = [each.delta for each in client.responses.create(**asked, stream=True) if each.type == "response.output_text.delta"]
    assert "".join(deltas) == client.responses.create(**asked).output_text == part["text"]


def test_a_large_answer_is_what_small_ones_are(server):
    """More than is made and written on the event loop."""
    found = both(server, input="begin", max_output_tokens=260, seed=1, ignore_eos=True, include=LOGPROBS, top_logprobs=20)
    (part,) = found["output"][0]["content"]
    assert len(part["logprobs"]) == 260 and all(len(one["top_logprobs"]) == 20 for one in part["logprobs"])


def test_a_conversation_goes_on(client, llm):
    """What came of the first answer is given back as it is, and the model reads what a chat would have."""
    asked = {"max_output_tokens": 12, "temperature": 0}
    items = [{"role": "user", "content": "one"}]
    first = client.responses.create(input=items, **asked)
    again = client.responses.create(input=[*items, *first.output, {"role": "user", "content": "two"}], **asked)
    chat = [*items, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "two"}]
    assert again.output_text == llm.generate(chat, max_tokens=12, temperature=0)[0].text
    refused = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    found = client.responses.create(input=[*items, refused], **asked)
    assert found.output_text == llm.generate([*items, {"role": "assistant", "content": "no"}], max_tokens=12, temperature=0)[0].text


def test_tools_that_the_model_chooses(server, client, llm):
    asked = {"input": "x", "tools": [WEATHER, CLOCK], "temperature": 0, "regex": re.escape(CALLS)}
    found = both(server, **asked)
    assert [item["type"] for item in found["output"]] == ["message", "function_call", "function_call", "message"]
    assert [item["content"][0]["text"] for item in found["output"][::3]] == ["Let me see.", " So be it."]
    assert [item["name"] for item in found["output"][1:3]] == ["weather", "clock"] and found["status"] == "completed"
    assert json.loads(found["output"][1]["arguments"]) == {"town": "Ulm"} and found["tools"][1]["name"] == "clock"
    one = both(server, **asked, parallel_tool_calls=False)
    assert [item["type"] for item in one["output"]].count("function_call") == 1
    none = both(server, **asked, tool_choice="none")
    assert none["output"][0]["content"][0]["text"] == CALLS and none["tool_choice"] == "none"
    cut = both(server, **asked, max_output_tokens=CALLS.index("Ulm"))
    assert cut["status"] == cut["output"][-1]["status"] == "incomplete" and cut["output"][-1]["type"] == "message"
    # What was called goes back to the model, with what came of it, as it is in a chat.
    items = [{"role": "user", "content": "x"}, *found["output"][:3]]
    calls = [item for item in items if item.get("type") == "function_call"]
    items += [{"type": "function_call_output", "call_id": call["call_id"], "output": f"of {call['name']}"} for call in calls]
    more = client.responses.create(input=items, max_output_tokens=12, temperature=0)
    made = [
        {"id": c["call_id"], "type": "function", "function": {"name": c["name"], "arguments": json.loads(c["arguments"])}} for c in calls
    ]
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Let me see.", "tool_calls": made}]
    chat += [{"role": "tool", "content": f"of {call['name']}"} for call in calls]
    assert more.output_text == llm.generate(chat, max_tokens=12, temperature=0)[0].text


@pytest.mark.parametrize("choice, names", [("required", {"weather", "clock"}), ({"type": "function", "name": "weather"}, {"weather"})])
def test_tools_that_must_be_called(server, choice, names):
    found = both(server, input="x", tools=[WEATHER, CLOCK], tool_choice=choice, max_output_tokens=200, seed=3)
    (call,) = found["output"]
    assert call["type"] == "function_call" and call["name"] in names and found["tool_choice"] == choice
    assert json.loads(call["arguments"]).keys() <= {"town"} and found["status"] == call["status"] == "completed"


def test_forms_of_the_text(server, client, directory):
    found = both(server, input="x", text={"format": {"type": "json_object"}}, max_output_tokens=10, temperature=0)
    assert found["output"][0]["content"][0]["text"].lstrip().startswith("{") and found["text"]["format"] == {"type": "json_object"}
    parsed = client.responses.parse(input="x", text_format=Person, max_output_tokens=100, temperature=0)
    assert isinstance(parsed.output_parsed, Person) and parsed.output_parsed.age < 100 and parsed.text.format.name == "Person"
    again = client.responses.create(input=[{"role": "user", "content": "x"}, *parsed.output], max_output_tokens=1)
    assert again.status
    with client.responses.stream(model=directory.name, input="x", text_format=Person, max_output_tokens=100, temperature=0) as stream:
        kinds = {each.type for each in stream}
        assert stream.get_final_response().output_parsed == parsed.output_parsed
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds
    tool = openai.lib._tools.pydantic_responses_function_tool(Person)
    asked = {"model": directory.name, "input": "x", "tools": [tool], "tool_choice": "required", "max_output_tokens": 300}
    asked["extra_body"] = {"seed": 3}
    called = client.responses.parse(**asked)
    assert isinstance(called.output[0].parsed_arguments, Person)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output[0].parsed_arguments == called.output[0].parsed_arguments
    assert client.responses.create(input=[{"role": "user", "content": "x"}, *called.output], max_output_tokens=1).status


def test_the_async_client(server, llm, directory):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = {"model": directory.name, "input": "hello", "max_output_tokens": 12, "temperature": 0}
            whole = (await client.responses.create(**asked)).output_text
            events = [each async for each in await client.responses.create(**asked, stream=True)]
            deltas = "".join(each.delta for each in events if each.type == "response.output_text.delta")
            asked |= {"max_output_tokens": 100, "text_format": Person}
            parsed = (await client.responses.parse(**asked)).output_parsed
            async with client.responses.stream(**asked) as stream:
                return whole, deltas, parsed, (await stream.get_final_response()).output_parsed

    whole, deltas, parsed, streamed = asyncio.run(ask())
    (right,) = llm.generate([{"role": "user", "content": "hello"}], max_tokens=12, temperature=0)
    assert whole == deltas == right.text and isinstance(parsed, Person) and parsed == streamed
    server.idle()


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}
CALL = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    "change, why",
    [
        ({"store": True}, "store: responses are not stored here"),
        ({"store": 0}, "store"),
        ({"background": True}, "background: responses are not stored here"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: responses are not stored here"),
        ({"conversation": {"id": "conv_1"}}, "conversation: responses are not stored here"),
        ({"truncation": "auto"}, "truncation"),
        ({"bogus": 1}, "Unrecognized request argument supplied: bogus"),
        ({"max_tokens": 1}, "Unrecognized request argument supplied: max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"model": "another"}, "does not exist"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": [IMAGE]}, "input_image"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "an item is a message, a function_call or"),
        ({"input": [{"type": ["message"]}]}, "an item is a message, a function_call or"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "No tool call found"),
        ({"input": [{**CALL, "arguments": "{"}]}, "input: the arguments of a call are no JSON"),
        ({"input": "x" * 3000}, "prompt and answer together"),
        ({"instructions": "\ud800"}, "half of a surrogate pair"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs: they are given where include is"),
        ({"include": LOGPROBS, "tools": [WEATHER]}, "include: no log-probabilities are given"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "Missing required parameter"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "strin"}}}}, "json_schema"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "string"}}]}, "tools[0].parameters"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "wether"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"regex": "("}, "regex"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said(server, change, why):
    with server.client() as http:
        for stream in (False, True):
            asked = {"input": "x", "max_output_tokens": 1, "stream": stream, **change}
            found = http.post("/v1/responses", content=json.dumps(asked), headers={"Content-Type": "application/json"})
            assert found.status_code == (404 if "model" in change else 400) and why in found.json()["error"]["message"], found.text
            assert found.json()["error"]["type"] == ("not_found_error" if "model" in change else "invalid_request_error")


def test_what_has_no_effect_is_taken():
    """As clients send it that say everything."""
    without = {"store": False, "background": False, "previous_response_id": None, "conversation": None, "truncation": "disabled"}
    without |= {"service_tier": "auto", "tools": [], "tool_choice": "auto", "text": {"verbosity": "medium"}, "include": []}
    without |= {"reasoning": {"effort": "low", "summary": None}, "top_logprobs": 0}
    without |= {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert ResponseRequest.model_validate({"input": "x", **without}).input[0].content[0].text == "x"


def test_an_engine_that_ends_amid_an_answer(directory):
    server = Server(directory, "inference.dtype=fp32")
    try:
        asked = {"input": "x", "max_output_tokens": 1900, "stream": True, "ignore_eos": True}
        with server.client() as http, http.stream("POST", "/v1/responses", json=asked) as stream:
            lines = stream.iter_lines()
            begun = list(islice(lines, 30))
            os.kill(server.engine(), signal.SIGKILL)
            response = check(told("\n".join([*begun, *lines, ""])))
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert "the engine has ended" in response["error"]["message"] and response["output"][0]["status"] == "incomplete"
        until(lambda: server.process.poll() is not None)
    finally:
        server.process.kill()
