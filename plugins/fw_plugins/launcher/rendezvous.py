"""Where the hosts of a run find each other: torch's c10d rendezvous, with every question to its store bounded in time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch.distributed.elastic.rendezvous.registry as registry
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from fw.api import LaunchSection, RunError
from fw.api.launching import network

_STORE_SECONDS = 60
T = TypeVar("T")


class BoundedRendezvous(RendezvousHandler):
    """Asks the store from threads of their own.

    A store behind a cable that is cut leaves its clients waiting in ``recv`` until the kernel gives the connection up, a quarter of an
    hour later. The agent must not wait with them: it watches the ranks.
    """

    def __init__(self, handler: RendezvousHandler, store_seconds: float, join_seconds: float) -> None:
        self._handler = handler
        self._store_seconds = store_seconds
        self._join_seconds = join_seconds
        self._asked: _Call[int] | None = None

    def num_nodes_waiting(self) -> int:
        """The last answer; the question is asked again behind it.

        Raises:
            RendezvousConnectionError: there has been no answer for too long.
        """
        waiting = 0
        if self._asked is not None and self._asked.done():
            waiting = self._asked.result(0)
            self._asked = None
        if self._asked is None:
            self._asked = _Call(self._handler.num_nodes_waiting)
        elif self._asked.age() > self._store_seconds:
            raise RendezvousConnectionError("no answer")
        return waiting

    def next_rendezvous(self) -> RendezvousInfo:
        """Join; no later than the time to join allows."""
        if self._asked is not None:
            with suppress(RendezvousConnectionError):
                self._asked.result(self._store_seconds)
            self._asked = None
        return _Call(self._handler.next_rendezvous).result(self._join_seconds + self._store_seconds)

    def shutdown(self) -> bool:
        """Close the rendezvous for all hosts, if the store can be reached."""
        with suppress(RendezvousConnectionError):
            return _Call(self._handler.shutdown).result(self._store_seconds / 2)
        return False

    @property
    def use_agent_store(self) -> bool:
        """As the handler has it."""
        return self._handler.use_agent_store

    def get_backend(self) -> str:
        """As the handler has it."""
        return self._handler.get_backend()

    def is_closed(self) -> bool:
        """As the handler has it."""
        return _Call(self._handler.is_closed).result(self._store_seconds)

    def set_closed(self) -> None:
        """As the handler has it."""
        _Call(self._handler.set_closed).result(self._store_seconds)

    def get_run_id(self) -> str:
        """As the handler has it."""
        return self._handler.get_run_id()


class _Call(Generic[T]):
    """A function that runs in a daemon thread, which the end of the process does not wait for."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._begun = time.monotonic()
        self._value: T | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], T]) -> None:
        try:
            self._value = function()
        except Exception as error:
            self._error = error

    def age(self) -> float:
        return time.monotonic() - self._begun

    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self, seconds: float) -> T:
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise RendezvousConnectionError(f"no answer within {seconds:.0f} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def _wait_for_name(host: str, deadline: float) -> None:
    """In Kubernetes a pod's name is known only once the pod is; anywhere else a name that is unknown stays so."""
    while "KUBERNETES_SERVICE_HOST" in os.environ and time.monotonic() < deadline:
        with suppress(RunError):
            network.resolve(host)
            return
        time.sleep(1)


def join(launch: LaunchSection) -> BoundedRendezvous:
    """Reach the store of the run, on the host that keeps it or from another; retried until the time to join is over.

    Raises:
        UserError: ``launch.interface`` is not there.
        RunError: the store cannot be reached, or the way to it is not clear.
    """
    # A host that is cut off must not wait longer for the store than its ranks wait for their peers.
    store_seconds = min(_STORE_SECONDS, launch.timeout)
    settings: dict[str, Any] = {"join_timeout": launch.join_timeout, "read_timeout": store_seconds}
    address, keeps_store = "localhost", None
    deadline = time.monotonic() + launch.join_timeout
    if launch.nodes > 1:
        known = network.addresses()
        _wait_for_name(launch.rendezvous_host, deadline)
        if launch.interface:
            network.check_interface(launch.interface, known, "launch")
            address = (known[launch.interface] or [""])[0]
        else:
            _, address = network.towards(launch.rendezvous_host, known)
        keeps_store = network.is_here(launch.rendezvous_host, known)
    host = f"[{launch.rendezvous_host}]" if ":" in launch.rendezvous_host else launch.rendezvous_host
    endpoint = f"{host}:{launch.rendezvous_port}"
    while True:
        try:
            more = settings if keeps_store is None else {**settings, "is_host": keeps_store}
            parameters = RendezvousParameters("c10d", endpoint, "fw", launch.nodes, launch.nodes, address, **more)
            return BoundedRendezvous(registry.get_rendezvous_handler(parameters), store_seconds, launch.join_timeout)
        except RendezvousConnectionError as error:
            if keeps_store:
                keeps_store = False  # another fw train of this machine keeps it already
            elif launch.nodes == 1 or time.monotonic() > deadline:
                raise RunError(f"rendezvous {endpoint} cannot be reached: {error.__cause__}; is its host up, its port open?") from error
