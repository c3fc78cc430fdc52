"""Lines of a batch: what is asked in them, and how one is answered beside those who wait for answers of their own."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from fw.config import parse_size
from fw.inference.results import Result
from fw.server import chat, completions, large, others
from fw.server.api import Api, Begun
from fw.server.bodies import parse
from fw.server.errors import ApiError, wrong
from fw.server.file_schemas import BatchError, BatchLine, Endpoint
from fw.server.logs import Log, Record, current
from fw.server.schemas import Body, ChatRequest, CompletionRequest, EmbeddingRequest
from fw.server.traces import Trace, no_traces

_LOOK_S = 0.1
"""Requests of others end without a word to a line that waits for room; so often it is looked for."""
_MOST_LINES = 1_000_000
_MOST_ERRORS = 100
_OF_THE_SERVER = frozenset({"loading", "draining", "engine_ended"})
_B = TypeVar("_B", bound=Body)
_encode = json.JSONEncoder(allow_nan=False).encode
_ENDPOINTS: Mapping[Endpoint, tuple[type[Body], Callable[..., Awaitable[Begun]]]] = {
    "/v1/chat/completions": (ChatRequest, chat.begin),
    "/v1/completions": (CompletionRequest, completions.begin),
    "/v1/embeddings": (EmbeddingRequest, others.begin_embeddings),
}


class NotNow(Exception):
    """The server ends, and with it what it does for a line; the next one is going to answer it."""


class Lines:
    """Reads and answers them, of all batches.

    Attributes:
        invalid: what is wrong with a body, in the words in which a request by itself is told.
    """

    def __init__(self, api: Api, log: Log, trace: Trace = no_traces) -> None:
        self._api, self._log, self._trace = api, log, trace
        self.invalid: Callable[[RequestValidationError], ApiError] = lambda error: wrong(str(error))
        self._longest = parse_size(api.settings.serve.max_body)
        self._reserved = 0
        self._gate, self._freed = asyncio.Lock(), asyncio.Event()

    @property
    def most(self) -> int:
        """That are answered at once."""
        return self._api.engines.most

    def of(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Those of a file that are not empty, and their numbers; of one that is too long, the beginning."""
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(self._longest + 1):
                number += 1
                rest = raw
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(self._longest)
                if raw.strip():
                    yield number, raw

    def read(self, raw: bytes, endpoint: Endpoint) -> BatchLine:
        """One.

        Raises:
            ApiError: it is no request to the endpoint.
        """
        if len(raw) > self._longest:
            raise wrong(f"the line is larger than the {self._longest} bytes that a request may have", code="request_too_large")
        try:
            given = parse(raw)
        except ApiError as error:
            raise wrong(str(error), code="invalid_json_line") from None
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise wrong("the line is no JSON object", code="invalid_json_line")
        line = self._parsed(BatchLine, given)
        if line.url != endpoint:
            raise wrong(f"url: '{line.url}' is not the batch's endpoint, {endpoint}", "url", "invalid_url")
        return line

    async def checked(self, path: Path, endpoint: Endpoint) -> tuple[int, list[BatchError]]:
        """How many a file has, and what is wrong with them."""
        errors: list[BatchError] = []
        there: set[str] = set()
        for number, raw in self.of(path):
            await asyncio.sleep(0)  # others are heard between two lines
            try:
                line = self.read(raw, endpoint)
                if line.custom_id in there:
                    raise wrong(f"custom_id: an earlier line has '{line.custom_id}', too", "custom_id", "duplicate_custom_id")
                if len(there) >= _MOST_LINES:
                    raise wrong(f"a batch has {_MOST_LINES:,} lines at most", code="too_many_lines")
                there.add(line.custom_id)
            except ApiError as error:
                errors.append(BatchError(code=error.code, line=number, message=str(error), param=error.param))
                if len(errors) >= _MOST_ERRORS or error.code == "too_many_lines":
                    break
        if not there and not errors:
            errors.append(BatchError(code="empty_file", message="the file has no line"))
        return len(there), errors

    async def answer(self, batch: str, line: BatchLine, endpoint: Endpoint) -> tuple[bool, bytes]:
        """Whether it went well, and what is written of it; whatever is wrong with it is an answer, too.

        Raises:
            NotNow: there is none.
        """
        record = Record(uuid.uuid4().hex, line.method, endpoint, more={"batch": batch})
        current.set(record)
        end = self._trace(record, {})
        try:
            whole, results = await self._asked(line, endpoint, record)
            told = await large.beside(results, lambda: told_of(line, replace(record, status=200), whole(results)))
            record.status = 200
        except ApiError as error:
            if error.code in _OF_THE_SERVER:
                raise NotNow from None
            record.status = error.status
            told = told_of(line, record, error.body())
        except NotNow:
            raise
        except Exception as error:
            self._log.failure("failed line", error, id=record.id)
            failed = ApiError(500, "the server has failed; its log says how, by the request's id", "internal_error")
            record.status = failed.status
            told = told_of(line, record, failed.body())
        finally:  # also of one that is not answered now
            end()
        self._log.request(record)
        return record.status == 200, told

    async def _asked(
        self, line: BatchLine, endpoint: Endpoint, record: Record
    ) -> tuple[Callable[[Sequence[Result]], dict[str, Any]], Sequence[Result]]:
        """Results, and what makes a body of them."""
        schema, begin = _ENDPOINTS[endpoint]
        body = self._parsed(schema, line.body)
        if getattr(body, "stream", None):
            raise wrong("stream: a line of a batch is answered as a whole", "stream")
        begun = await self._begun(body, begin, record)
        try:
            return begun.whole, await self._api.all_results(begun, self._place)
        finally:
            self._api.leave(begun.tickets)
            self._freed.set()

    async def _begun(self, body: Body, begin: Callable[..., Awaitable[Begun]], record: Record) -> Begun:
        engines, width = self._api.engines, _width(self._api, body)
        while True:
            async with self._place(width):
                record.begun = time.monotonic()
                try:
                    return await begin(self._api, body, priority=1)
                except ApiError as error:  # others may have been quicker
                    if error.code != "queue_full" or width > engines.most + self._api.settings.serve.max_queue:
                        raise

    @asynccontextmanager
    async def _place(self, width: int) -> AsyncIterator[None]:
        """Room for so many sequences, which is theirs until they have begun."""
        async with self._gate:  # one after another, so that wide ones come to their turn
            await self._room(width)
            self._reserved += width
        try:
            yield
        finally:
            self._reserved -= width
            self._freed.set()

    async def _room(self, width: int) -> None:
        """Wait until so many sequences can be computed at once, so that they take no place of the queue."""
        engines = self._api.engines
        while True:
            if engines.condition != "ready":
                raise NotNow
            taken = engines.sequences + self._reserved
            if not taken or taken + width <= engines.most:
                return
            self._freed.clear()
            look = asyncio.get_running_loop().call_later(_LOOK_S, self._freed.set)
            try:
                await self._freed.wait()
            finally:
                look.cancel()

    def _parsed(self, kind: type[_B], given: Mapping[str, Any]) -> _B:
        try:
            return kind.model_validate(given)
        except ValidationError as error:
            found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            raise self.invalid(RequestValidationError(found, body=given)) from None


def told_of(line: BatchLine, record: Record | None, body: Mapping[str, Any]) -> bytes:
    """As it is written.

    Args:
        record: of the request; None where it was not asked, and the body is why.
    """
    told: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex[:24]}", "custom_id": line.custom_id, "response": None, "error": None}
    if record is None:
        told["error"] = body
    else:
        told["response"] = {"status_code": record.status, "request_id": record.id, "body": body}
    return large.written(told, _encode) + b"\n"


def _width(api: Api, body: Body) -> int:
    """Sequences that a request begins with."""
    if isinstance(body, CompletionRequest):
        return len(api.prompts(body.prompt)) * (body.best_of or body.n or 1)
    if isinstance(body, EmbeddingRequest):
        return min(len(api.prompts(body.input, "input")), api.engines.most)
    return getattr(body, "n", None) or 1
