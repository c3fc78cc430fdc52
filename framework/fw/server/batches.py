"""``/v1/batches``: files of requests, which are answered where nobody waits for an answer.

A line is answered as a request by itself is, behind all of those. Its answer is in the batch's output, or in the file of what failed, as
soon as it is known: from there the next server goes on, however this one ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, Response

from fw.config import parse_size
from fw.server.api import Api
from fw.server.batch_lines import Lines
from fw.server.batch_run import ANSWERING, UNFINISHED, Run
from fw.server.errors import ApiError, not_found, wrong
from fw.server.file_schemas import Batch, BatchList, BatchRequest, KeptBatch
from fw.server.files import Files, answers, check_taken, page
from fw.server.logs import Log
from fw.server.storage import BATCH, FILE, Storage, is_id, new_id, no_room
from fw.server.traces import Trace, no_traces

_WINDOW_S = 24 * 60 * 60


class Batches:
    """All that there are, with their files.

    Args:
        trace: as the guard's; lines are answered as requests are.

    Raises:
        UserError: the directory for them cannot be used.
    """

    def __init__(self, api: Api, log: Log, trace: Trace = no_traces) -> None:
        self._api, self._log = api, log
        self._storage = Storage(api.settings.serve.files_dir)
        self.files = Files(self._storage, parse_size(api.settings.serve.files_space))
        self.lines = Lines(api, log, trace)
        self._kept = self._storage.records(KeptBatch, BATCH)
        unfinished = [kept for kept in self._kept.values() if kept.batch.status in UNFINISHED]
        going_on = {id for kept in unfinished for id in (kept.output, kept.failed)}
        self._storage.tidy(lambda id: id in self.files.known or id in going_on)
        self.files.needed = self._needs
        self._runs: dict[str, tuple[Run, asyncio.Future[None]]] = {}
        self._started = False

    @property
    def known(self) -> dict[str, Batch]:
        """By their ids."""
        return {id: kept.batch for id, kept in self._kept.items()}

    def get(self, id: str) -> Batch:
        """One.

        Raises:
            ApiError: there is none.
        """
        if not is_id(id, BATCH) or id not in self._kept:
            raise not_found(f"No such batch: {id}", code="batch_not_found")
        return self._kept[id].batch

    def start(self) -> None:
        """Go on with all that have not ended; the engines are ready."""
        self._started = True
        for _, kept in sorted(self._kept.items()):
            self._go_on(kept)

    async def close(self) -> None:
        """Whatever goes on is left as it is."""
        tasks = [task for _, task in self._runs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._storage.close()

    async def create(self, asked: BatchRequest) -> Batch:
        """A new one.

        Raises:
            ApiError: there is no such file, or no room.
        """
        check_taken(self._api)
        if self.files.get(asked.input_file_id, "input_file_id").purpose != "batch":
            raise wrong("input_file_id: the purpose of this file is not 'batch'", "input_file_id", "invalid_value")
        now = int(time.time())
        batch = Batch(
            id=new_id(BATCH),
            endpoint=asked.endpoint,
            model=self._api.settings.name,
            input_file_id=asked.input_file_id,
            created_at=now,
            expires_at=now + _WINDOW_S,
            metadata=asked.metadata,
        )
        kept = self._kept[batch.id] = KeptBatch(batch=batch, output=new_id(FILE), failed=new_id(FILE))
        try:
            await self._storage.write(batch.id, kept)
        except OSError as error:
            del self._kept[batch.id]
            raise no_room(error) from None
        self._go_on(kept)
        return batch

    async def cancel(self, id: str) -> Batch:
        """Lines that are not answered yet are not going to be.

        Raises:
            ApiError: there is none, or it has ended.
        """
        batch = self.get(id)
        if batch.status in ("cancelling", "cancelled"):
            return batch
        if batch.status not in ANSWERING:
            raise wrong(f"the batch is {batch.status}; there is nothing to cancel", code="batch_ended")
        batch.status, batch.cancelling_at = "cancelling", int(time.time())
        told = batch.model_copy(deep=True)
        if id in self._runs:
            self._runs[id][0].stop()
        else:
            self._go_on(self._kept[id])
        try:
            await self._storage.write(id, self._kept[id])
        except OSError as error:
            raise no_room(error) from None
        return told

    def _needs(self, id: str) -> bool:
        """Whether a file is the input of a batch that has not ended."""
        return any(kept.batch.input_file_id == id and kept.batch.status in UNFINISHED for kept in self._kept.values())

    def _go_on(self, kept: KeptBatch) -> None:
        batch = kept.batch
        if not self._started or batch.status not in UNFINISHED or batch.id in self._runs:
            return
        left = batch.expires_at - time.time()
        if batch.status in ANSWERING and batch.model != self._api.settings.name and left > 0:
            self._log.line("batch", id=batch.id, status=batch.status, message=f"waits for a server of its model, {batch.model}")
            asyncio.get_running_loop().call_later(left, self._go_on, kept)  # no server of it may come
            return
        run = Run(kept, self._storage, self.files, self.lines, self._log)
        task = asyncio.ensure_future(run.run())
        self._runs[batch.id] = run, task
        task.add_done_callback(lambda _: self._runs.pop(batch.id))


def register(
    app: FastAPI, batches: Batches, errors: dict[int | str, dict[str, Any]], invalid: Callable[[RequestValidationError], ApiError]
) -> None:
    """The routes.

    Args:
        errors: what each may answer, in the document.
        invalid: what is wrong with a body.
    """
    batches.lines.invalid = invalid
    of_one = answers(errors, {404: "There is no such batch."})
    writing = answers(errors, {404: "There is no such batch, or no such file.", 507: "There is no room for it."})

    @app.post("/v1/batches", responses=writing, response_model=Batch, tags=["batches"])
    async def create_batch(body: BatchRequest) -> Response:
        return JSONResponse((await batches.create(body)).model_dump())

    @app.get("/v1/batches", responses=answers(errors, {}), response_model=BatchList, tags=["batches"])
    async def list_batches(
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        after: Annotated[str | None, Query(pattern=rf"^{BATCH}[0-9a-f]{{24}}$")] = None,
    ) -> Response:
        return page(batches.known, after, limit)

    @app.get("/v1/batches/{batch_id}", responses=of_one, response_model=Batch, tags=["batches"])
    async def retrieve_batch(batch_id: str) -> Response:
        return JSONResponse(batches.get(batch_id).model_dump())

    @app.post("/v1/batches/{batch_id}/cancel", responses=writing, response_model=Batch, tags=["batches"])
    async def cancel_batch(batch_id: str) -> Response:
        return JSONResponse((await batches.cancel(batch_id)).model_dump())
