"""An engine in a thread of its own, for who waits for many answers at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from fw.inference.engine import Engine
from fw.inference.options import Sampling
from fw.inference.results import Delta, Result

Told = Delta | Result | BaseException
"""What becomes of a request: what each step adds, and in the end its result, or why there is none."""
_T = TypeVar("_T")
_CLOSED = "the engine was closed before the answer was whole"


class Background:
    """Steps while there are requests, and sleeps while there are none. All methods may be called by any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._listeners: dict[str, Callable[[Told], None]] = {}
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="fw engine", daemon=True)
        self._thread.start()

    def add(
        self,
        key: str,
        prompt: Sequence[int],
        sampling: Sampling,
        tell: Callable[[Told], None],
        priority: int = 0,
        adapter: str | None = None,
    ) -> None:
        """A request.

        Args:
            tell: is called by the engine's thread, soon over: with each delta, and last with the result, or with what went wrong.
        """

        def begin() -> None:
            try:
                self._engine.add(key, prompt, sampling, priority, adapter)
            except Exception as error:
                tell(error)
            else:
                self._listeners[key] = tell

        if not self._takes(begin):
            tell(RuntimeError(_CLOSED))

    def abort(self, key: str) -> None:
        """End a request before the next step; nobody is told any more. One that has ended is none."""

        def end() -> None:
            self._listeners.pop(key, None)
            self._engine.abort(key)

        self._takes(end)

    def call(self, what: Callable[[], _T]) -> Future[_T]:
        """What the engine's thread makes of it between two steps."""
        future: Future[_T] = Future()

        def do() -> None:
            try:
                future.set_result(what())
            except BaseException as error:
                future.set_exception(error)

        if not self._takes(do):
            future.set_exception(RuntimeError(_CLOSED))
        return future

    def _takes(self, task: Callable[[], None]) -> bool:
        """Whether the thread will do it: it is there until it has ended."""
        with self._closing:
            if not self._closed:
                self._todo.put(task)
            return not self._closed

    def close(self) -> None:
        """End all requests, and the thread."""
        self.end()
        self._thread.join()

    def end(self) -> None:
        """The same, without waiting for it."""
        self._todo.put(None)

    def _work(self) -> None:
        closed = False
        while not closed:
            try:
                while not closed and (not len(self._engine) or not self._todo.empty()):
                    if (task := self._todo.get()) is None:
                        closed = True
                    else:
                        task()
                if not closed:
                    self._tell(*self._engine.step())
            except Exception as error:
                self._give_up(error)
        with self._closing:
            self._closed = True
        while not self._todo.empty():  # who came too late is told so, too
            if (task := self._todo.get()) is not None:
                task()
        self._give_up(RuntimeError(_CLOSED))

    def _tell(self, deltas: Sequence[Delta], results: Sequence[Result]) -> None:
        for delta in deltas:
            if (tell := self._listeners.get(delta.key)) is not None:
                tell(delta)
        for result in results:
            if (tell := self._listeners.pop(result.key, None)) is not None:
                tell(result)

    def _give_up(self, error: BaseException) -> None:
        """Nobody waits for ever."""
        listeners, self._listeners = self._listeners, {}
        for key, tell in listeners.items():
            self._engine.abort(key)
            tell(error)
