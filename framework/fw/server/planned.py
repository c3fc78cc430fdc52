"""What an engine was predicted to take; in a process of its own, beside the engines."""

from __future__ import annotations

import threading
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from fw.launching.child import Child, ended, give_way, joined
from fw.server.messages import Begin


class Plan:
    """Is made as soon as somebody asks for it.

    Args:
        begin: what an engine loads.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin = begin
        self._thread: threading.Thread | None = None
        self._found: dict[str, int] = {}

    def now(self) -> dict[str, int]:
        """Bytes of ``weights``, ``kv``, a ``step`` and ``all`` together; none where it is not known yet, or cannot be planned."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name="plan", daemon=True)
            self._thread.start()
        return self._found

    def _make(self) -> None:
        child = Child("fw.server.planned")
        try:
            child.connection.send(self._begin)
            told = child.connection.recv()
            self._found = told if isinstance(told, dict) else {}
        except (EOFError, OSError):
            pass
        finally:
            child.end(patience=5)


def main() -> NoReturn:
    """Of the process."""
    connection, _ = joined()
    give_way()  # nobody waits for it
    ended(connection, partial(_run, connection))


def _run(connection: Connection[Any, Any]) -> None:
    from fw.planning.generation import gpu_here, plan_generation
    from fw.planning.placing import placed_here
    from fw.recipe.inference import resolve_inference

    begin: Begin = connection.recv()
    recipe = placed_here(begin.path, resolve_inference(begin.config), begin.adapter)
    rank = plan_generation(begin.path, recipe, begin.adapter, gpu_here(recipe)).largest
    peak = rank.at_peak
    weights, kv = peak.get("parameters", 0), peak.get("kv", 0)
    connection.send(
        {
            "weights": weights,
            "kv": kv,
            "step": sum(peak.values()) - weights - kv,
            "all": rank.reserved_peak if rank.driver_peak else rank.host_peak,
        }
    )
    connection.recv()  # until it is let go
