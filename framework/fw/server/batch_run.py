"""One batch, from what has been done of it to its end."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Final

from fw.errors import describe
from fw.place import sync
from fw.server.batch_lines import Lines, NotNow, told_of
from fw.server.errors import ApiError
from fw.server.file_schemas import Batch, BatchError, BatchErrors, BatchLine, KeptBatch, RequestCounts, Status
from fw.server.files import Files
from fw.server.logs import Log, current
from fw.server.storage import Storage, undivided

ANSWERING: Final = frozenset[Status]({"validating", "in_progress"})
UNFINISHED: Final = ANSWERING | {"finalizing", "cancelling"}
_AGAIN_S = 30.0
"""After which it is tried again to write what could not be written."""
_EXPIRED = {"code": "batch_expired", "message": "This request could not be executed before the completion window expired."}


class Run:
    """Answers the lines of a batch. What it has written is what is done: whoever begins again goes on after it."""

    def __init__(self, kept: KeptBatch, storage: Storage, files: Files, lines: Lines, log: Log) -> None:
        self._kept, self._storage, self._files, self._lines, self._log = kept, storage, files, lines, log
        self._finished: set[str] = set()
        self._expired = False
        self._work: asyncio.Future[bool] | None = None
        self._writing = asyncio.Lock()

    @property
    def _batch(self) -> Batch:
        return self._kept.batch

    @property
    def _input(self) -> Path:
        return self._files.path(self._batch.input_file_id)

    def stop(self) -> None:
        """No line is worked on any more; what comes of it says the batch's status."""
        if self._work is not None:
            self._work.cancel()

    async def run(self) -> None:
        """To its end, or until the server ends."""
        current.set(None)  # the request that has begun it is another's
        while True:
            try:
                return await self._run()
            except OSError as error:
                self._log.line("batch", id=self._batch.id, message=f"tries again in {_AGAIN_S:g} s: {describe(error)}")
            await asyncio.sleep(_AGAIN_S)

    async def _run(self) -> None:
        try:
            await self._go_on()
        except OSError:
            raise
        except ApiError as error:
            await self._fail([BatchError(code=error.code, message=str(error), param=error.param)])
        except Exception as error:
            self._log.failure("batch", error, id=self._batch.id)
            await self._fail([BatchError(code="internal_error", message="the server has failed; its log says how")])

    async def _go_on(self) -> None:
        if self._batch.status not in UNFINISHED:  # it has ended, and only that could not be written
            await self._save()
            return
        await self._recall()
        if self._batch.status not in ANSWERING:
            await self._end(answered=True)
            return
        left = self._batch.expires_at - time.time()
        self._expired = left <= 0
        answered = not self._expired and await self._answered(left)
        if answered or self._expired or self._batch.status == "cancelling":
            await self._end(answered)

    async def _recall(self) -> None:
        """What was answered before; a line that was being written when the server ended is cut off."""
        self._finished.clear()
        counts = [0, 0]
        for number, path in enumerate(map(self._files.path, (self._kept.output, self._kept.failed))):
            if not path.exists():
                continue
            whole = 0
            with path.open("rb") as file:
                for raw in file:
                    await asyncio.sleep(0)
                    try:
                        custom_id = json.loads(raw)["custom_id"]
                    except (ValueError, LookupError, TypeError):
                        break
                    if not raw.endswith(b"\n"):
                        break
                    self._finished.add(custom_id)
                    whole, counts[number] = whole + len(raw), counts[number] + 1
            os.truncate(path, whole)
        total = self._batch.request_counts.total
        self._batch.request_counts = RequestCounts(total=total, completed=counts[0], failed=counts[1])

    async def _answered(self, seconds: float) -> bool:
        """Whether every line is, before time is over, or somebody does not want it any more, or the server ends."""

        def expire() -> None:
            self._expired = True
            self.stop()

        work = self._work = asyncio.ensure_future(self._answer_all())
        timer = asyncio.get_running_loop().call_later(seconds, expire)
        try:
            await asyncio.wait({work})
            return not work.cancelled() and work.result()
        finally:
            timer.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._work = None

    async def _answer_all(self) -> bool:
        batch = self._batch
        if batch.status == "validating":
            count, errors = await self._lines.checked(self._input, batch.endpoint)
            if errors:
                await self._fail(errors)
                return False
            batch.status, batch.in_progress_at, batch.request_counts.total = "in_progress", int(time.time()), count
            await self._save()
        going: set[asyncio.Future[None]] = set()
        try:
            for _, raw in self._lines.of(self._input):
                await asyncio.sleep(0)
                line = self._lines.read(raw, batch.endpoint)
                if line.custom_id not in self._finished:
                    while len(going) >= self._lines.most:
                        going = await _some(going)
                    going.add(asyncio.ensure_future(self._answer(line)))
            while going:
                going = await _some(going)
        except NotNow:
            await asyncio.gather(*going, return_exceptions=True)  # what has begun may end
            return False
        finally:
            for task in going:
                task.cancel()
            await asyncio.gather(*going, return_exceptions=True)
        return True

    async def _answer(self, line: BatchLine) -> None:
        well, told = await self._lines.answer(self._batch.id, line, self._batch.endpoint)
        await undivided(self._write(line, well, told))

    async def _write(self, line: BatchLine, well: bool, told: bytes) -> None:
        """At once, so that a server that ends now has lost none."""
        async with self._writing:
            await asyncio.to_thread(self._storage.append, self._kept.output if well else self._kept.failed, told)
            self._finished.add(line.custom_id)
            counts = self._batch.request_counts
            counts.completed, counts.failed = counts.completed + well, counts.failed + (not well)

    async def _fail(self, errors: list[BatchError]) -> None:
        batch = self._batch
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), BatchErrors(data=errors)
        await self._save()

    async def _end(self, answered: bool) -> None:
        """Its files are given, whole or not."""
        batch = self._batch
        last: Status = "expired"
        if batch.status == "cancelling":
            last = "cancelled"
        elif answered:
            last, batch.status, batch.finalizing_at = "completed", "finalizing", int(time.time())
            await self._save()
        else:
            await self._tell_expired()
        batch.output_file_id = await self._given(self._kept.output, f"{batch.id}_output.jsonl")
        batch.error_file_id = await self._given(self._kept.failed, f"{batch.id}_error.jsonl")
        setattr(batch, f"{last}_at", int(time.time()))
        batch.status = last
        await self._save()

    async def _tell_expired(self) -> None:
        """The lines that have no answer."""
        if self._batch.in_progress_at is None:
            return
        for _, raw in self._lines.of(self._input):
            await asyncio.sleep(0)
            line = self._lines.read(raw, self._batch.endpoint)
            if line.custom_id not in self._finished:
                await undivided(self._write(line, False, told_of(line, None, _EXPIRED)))

    async def _given(self, id: str, name: str) -> str | None:
        """A file of answers is everybody's from now on, unless there are none in it."""
        if id in self._files.known:
            return id
        path = self._files.path(id)
        if not path.exists() or not path.stat().st_size:
            path.unlink(missing_ok=True)
            return None
        await asyncio.to_thread(sync, path)
        return (await self._files.keep(id, name, "batch_output")).id

    async def _save(self) -> None:
        await self._storage.write(self._batch.id, self._kept)
        self._log.line("batch", id=self._batch.id, status=self._batch.status, **self._batch.request_counts.model_dump())


async def _some(tasks: set[asyncio.Future[None]]) -> set[asyncio.Future[None]]:
    """Those that are left when one at least has ended."""
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return left
