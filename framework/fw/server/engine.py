"""An engine's process, seen from the server's event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fw.errors import UserError, describe
from fw.inference.results import Delta, Result
from fw.launching.child import Child
from fw.server.errors import ApiError, wrong
from fw.server.logs import current, note
from fw.server.messages import Abort, Add, Begin, Done, DropAdapter, Hold, LoadAdapter, Loaded, Release, State, Stepped

Told = Delta | Result | ApiError
"""What becomes of a request: what each step adds, and in the end its result, or why there is none."""
_PATIENCE_S = 5.0
_log = logging.getLogger(__name__)


def start_process(begin: Begin, environment: dict[str, str] | None = None) -> Child:
    """A process that loads. It ends with this one, whatever becomes of it here."""
    child = Child("fw.server.worker", environment={"TQDM_DISABLE": "1", **(environment or {})})
    with suppress(OSError):  # it is gone, which whoever listens hears
        child.connection.send(begin)
    return child


class EngineProcess:
    """One engine. All methods are the event loop's.

    Args:
        child: of :func:`start_process`.
        on_loaded, on_end: called when it is ready; when it is gone, with why, but for :meth:`close`.
    """

    def __init__(
        self,
        child: Child,
        number: int,
        on_loaded: Callable[[EngineProcess], None],
        on_end: Callable[[UserError | str], None],
    ) -> None:
        self.number, self.state = number, State()
        self.loaded: Loaded | None = None
        self._sequences: Counter[int] = Counter()
        self._on_loaded, self._on_end = on_loaded, on_end
        self._tickets: dict[str, Ticket] = {}
        self._asked: dict[str, asyncio.Future[Done]] = {}
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._child = child
        # Sent by a thread: an engine hears between its steps only, and what fits into a pipe until then is less than a queue's prompts.
        self._unsent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._speaker = threading.Thread(target=self._speak, name=f"to engine {number}", daemon=True)
        self._speaker.start()
        threading.Thread(target=self._listen, name=f"engine {number}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._child.process.pid

    @property
    def sequences(self) -> int:
        """Of requests that it has, waiting or running."""
        return self._sequences.total()

    def ahead(self, priority: int) -> int:
        """Those among them that go before the next request of this priority."""
        return sum(sequences for each, sequences in self._sequences.items() if each <= priority)

    def begin(self, ticket: Ticket, add: Add) -> None:
        """A request."""
        self._tickets[add.key] = ticket
        self._sequences[ticket.priority] += ticket.sequences
        self._unsent.put(add)

    def leave(self, ticket: Ticket) -> bool:
        """It is not wanted any more; whether it had not ended."""
        if self._tickets.pop(ticket.key, None) is None:
            return False
        self._sequences[ticket.priority] -= ticket.sequences
        self._unsent.put(Abort(ticket.key))
        return True

    def tell(self, message: Hold | Release) -> None:
        """What nobody answers."""
        self._unsent.put(message)

    async def change(self, message: LoadAdapter | DropAdapter) -> Done:
        """Load or drop an adapter."""
        future: asyncio.Future[Done] = self._loop.create_future()
        self._asked[message.key] = future
        self._unsent.put(message)
        try:
            return await future
        finally:
            self._asked.pop(message.key, None)

    def give_up(self, why: ApiError) -> None:
        """On all requests."""
        for key, ticket in list(self._tickets.items()):
            self._end(key, why)
            self._unsent.put(Abort(ticket.key))

    async def close(self) -> None:
        """End it, and what it still has."""
        self._closed = True
        self._unsent.put(None)
        await asyncio.to_thread(self._speaker.join, _PATIENCE_S)
        await asyncio.to_thread(self._child.end, _PATIENCE_S)

    def _speak(self) -> None:
        """In a thread: whatever it is to hear, in order."""
        with suppress(OSError):  # it is gone, which is heard from the thread that listens
            while (message := self._unsent.get()) is not None:
                try:
                    self._child.connection.send(message)
                except OSError:
                    raise
                except Exception as error:  # it cannot be written as bytes, and none of it has been sent
                    self._to_loop(self._not_said, (message.key, error))

    def _listen(self) -> None:
        """In a thread: whatever it says, to the event loop."""
        told: UserError | str | None = None
        while (message := self._said()) is not None:
            if isinstance(message, UserError | str):
                told = message
            else:
                self._to_loop(self._hear, message)
        try:
            self._child.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:  # it is there and says no more
            self._child.process.kill()
            self._child.process.wait()
        self._to_loop(self._gone, self._child.fate(told) or "ended")

    def _said(self) -> Any:
        """What it says next; None where nothing more can be heard."""
        try:
            return self._child.connection.recv()
        except (EOFError, OSError):
            return None
        except Exception as error:  # no message, and nobody knows where the next one begins
            _log.error("engine %d cannot be understood: %s", self.number, describe(error))
            self._child.process.kill()
            return None

    def _to_loop(self, hear: Callable[[Any], None], what: Any) -> None:
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(hear, what)

    def _not_said(self, what: tuple[str, Exception]) -> None:
        key, error = what
        if isinstance(error, RecursionError):
            why = wrong("the request is nested too deeply")
        else:
            why = self._fault(key, f"{type(error).__name__}: {error}")
        self._end(key, why)
        if (future := self._asked.get(key)) is not None and not future.done():
            future.set_exception(why)

    @staticmethod
    def _fault(key: str, why: str, said: str = "the request has failed; the server's log says how, by its id") -> ApiError:
        """What nobody asked for; only the log says how it came about."""
        _log.error("%s has failed: %s", key, why)
        return ApiError(500, said, "internal_error")

    def _hear(self, message: Loaded | Stepped | Done) -> None:
        if isinstance(message, Stepped):
            self.state = message.state
            for delta in message.deltas:
                if (ticket := self._tickets.get(delta.key)) is not None:
                    # An answer that could not go on ends with an error, and not for a reason.
                    ticket.tell(replace(delta, finish_reason=None) if delta.finish_reason == "abort" else delta)
            for result in message.results:
                self._end(result.key, self._outcome(result))
            for key, why in message.refused.items():
                self._end(key, wrong(why))
            for key, why in message.failed.items():
                self._end(key, self._fault(key, why))
        elif isinstance(message, Loaded):
            self.loaded, self.state = message, message.state
            self._on_loaded(self)
        elif (future := self._asked.get(message.key)) is not None and not future.done():
            future.set_result(message)

    def _outcome(self, result: Result) -> Result | ApiError:
        if result.fault is not None:
            return self._fault(result.key, result.fault, *([result.fault] if result.fault == result.error else []))
        return result if result.error is None else wrong(result.error)

    def _end(self, key: str, last: Result | ApiError) -> None:
        if (ticket := self._tickets.pop(key, None)) is not None:
            self._sequences[ticket.priority] -= ticket.sequences
            ticket.tell(last)

    def _gone(self, why: UserError | str) -> None:
        error = ApiError(503 if self._closed else 500, "the engine has ended, and the answer with it", "engine_ended")
        for key in list(self._tickets):
            self._end(key, error)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error)
        if not self._closed:
            self._on_end(why)


class Ticket:
    """Of one request at an engine: what becomes of it, as it comes.

    Attributes:
        begun: when the request arrived, in seconds of the monotonic clock.
    """

    def __init__(self, engine: EngineProcess, key: str, sequences: int, priority: int = 0) -> None:
        self.engine, self.key, self.sequences, self.priority = engine, key, sequences, priority
        record = current.get()
        self.begun = time.monotonic() if record is None else record.begun
        self._told: asyncio.Queue[Told] = asyncio.Queue()

    def tell(self, each: Told) -> None:
        """The engine's."""
        self._told.put_nowait(each)

    async def next(self) -> Delta | Result:
        """What comes next; last the result.

        Raises:
            ApiError: there is none.
        """
        each = await self._told.get()
        if isinstance(each, ApiError):
            if each.status == 500:
                note(failed=self.key)
            raise each
        return each

    def leave(self) -> bool:
        """Nobody listens any more; whether there would have been more to hear."""
        return self.engine.leave(self)
