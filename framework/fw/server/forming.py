"""Forms of answers, made beside the steps: one may take as long as a hundred of them."""

from __future__ import annotations

import threading
from collections import deque
from itertools import count
from multiprocessing.connection import Pipe
from queue import PriorityQueue

from fw.inference.adapters import Adapter
from fw.inference.structure import Form, Structure
from fw.server.messages import Add

Asked = tuple[Add, Adapter | None]
"""A request, and its adapter: the one that was there when the request came."""


class Forming:
    """Makes them in a thread, one after another; those of requests that go before others first.

    Attributes:
        ready: can be read, a message for each, when :meth:`made` has something to give.
    """

    def __init__(self, structure: Structure) -> None:
        self._structure = structure
        self._asked: PriorityQueue[tuple[int, int, Asked]] = PriorityQueue()
        self._numbers = count()
        self._made: deque[tuple[Asked, Form | Exception | None]] = deque()
        self._wanted: set[str] = set()
        self.ready, self._done = Pipe(duplex=False)
        threading.Thread(target=self._work, name="forms", daemon=True).start()

    def __len__(self) -> int:
        """Requests whose forms are still wanted."""
        return len(self._wanted)

    def ask(self, add: Add, adapter: Adapter | None = None) -> None:
        """For a request's form."""
        self._wanted.add(add.key)
        self._asked.put((add.priority, next(self._numbers), (add, adapter)))

    def leave(self, key: str) -> None:
        """It is not wanted any more; one that is not known is none."""
        self._wanted.discard(key)

    def made(self) -> tuple[Asked, Form | Exception | None] | None:
        """The next request's, or why it cannot be made; None where it is not wanted any more."""
        self.ready.recv_bytes()
        asked, found = self._made.popleft()
        if asked[0].key not in self._wanted:
            return None
        self._wanted.remove(asked[0].key)
        return asked, found

    def _work(self) -> None:
        while True:
            _, _, asked = self._asked.get()
            add = asked[0]
            try:
                found: Form | Exception | None = self._structure.form(add.sampling) if add.key in self._wanted else None
            except Exception as error:
                found = error
            except BaseException as error:  # a panic of the library's, which is no Exception
                found = RuntimeError(f"{type(error).__name__}: {error}")
            self._made.append((asked, found))
            self._done.send_bytes(b" ")
