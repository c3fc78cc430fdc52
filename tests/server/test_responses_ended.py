"""Events of a response whose sending is stopped from without."""

from __future__ import annotations

import asyncio
import os
import signal
from itertools import islice
from types import SimpleNamespace

from fw.inference.results import Delta
from fw.server.errors import ApiError
from fw.server.response_schemas import ResponseBody
from fw.server.responses import Answer, Stream
from server.test_responses import check, told
from serving import serving


def test_events_go_on_where_sending_them_was_stopped():
    """None is told twice, and none is left out, wherever that was; and what has ended remains as it has."""
    asked = SimpleNamespace(tools=None, ticket=None, of=SimpleNamespace(sampling=SimpleNamespace(logprobs=None)))

    async def follow(ticket):
        for text in ("a", "b"):
            yield Delta("1", 0, text, None, None, None)

    async def stopped(sent):
        head = ResponseBody.model_fields.keys() - {"id", "object", "created_at", "status", "output"}
        answer = Answer(dict.fromkeys(head))
        stream = Stream(SimpleNamespace(follow=follow), asked, answer)
        events = stream.events()
        found = [await anext(events) for _ in range(sent + 1)]
        return told(b"".join([*found[:sent], stream.failed(ApiError(408, "late"))]).decode())

    for sent in range(6):
        events = asyncio.run(stopped(sent))
        assert [each["sequence_number"] for each in events] == list(range(len(events))), sent
        kinds = [each["type"] for each in events]
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.failed"
        assert kinds.count("response.failed") == 1 and events[-1]["response"]["error"] == {"code": "server_error", "message": "late"}


def test_an_answer_that_takes_too_long_fails_in_the_words_of_its_events(directory):
    asked = {"input": "x", "max_output_tokens": 1900, "stream": True, "ignore_eos": True}
    with serving(directory, "inference.dtype=fp32", "--timeout", "2") as server:
        engine = server.engine()
        with server.client() as http, http.stream("POST", "/v1/responses", json=asked) as stream:
            lines = stream.iter_lines()
            begun = list(islice(lines, 12))
            os.kill(engine, signal.SIGSTOP)
            try:
                response = check(told("\n".join([*begun, *lines, ""])))
            finally:
                os.kill(engine, signal.SIGCONT)
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert "more than the 2 s it may" in response["error"]["message"] and response["output"][0]["status"] == "incomplete"
