"""What an engine was predicted to take; in a process of its own, beside the engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from fw.launching.child import Child, ended, give_way, joined
from fw.server.messages import Begin, Loaded


class Plan:
    """Is made as soon as somebody asks for it.

    Args:
        begin: what an engine loads.
        loaded: what it said then. Of what was free before nobody else knows.
    """

    def __init__(self, begin: Begin, loaded: Callable[[], Loaded]) -> None:
        self._begin, self._loaded = begin, loaded
        self._thread: threading.Thread | None = None
        self._found: dict[str, int] = {}

    def now(self) -> dict[str, int]:
        """Bytes of ``weights``, ``kv``, a ``step`` and ``all`` together; none where it is not known yet, or cannot be planned."""
        if self._thread is None:
            loaded = self._loaded()
            self._thread = threading.Thread(target=self._make, args=(loaded.offload, loaded.kv_budget_bytes), name="plan", daemon=True)
            self._thread.start()
        return self._found

    def _make(self, offload: Mapping[str, Any], kv_budget_bytes: int) -> None:
        child = Child("fw.server.planned")
        try:
            child.connection.send((self._begin, offload, kv_budget_bytes))
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
    from fw.recipe.inference import resolve_inference

    begin, offload, kv_budget_bytes = connection.recv()
    recipe = resolve_inference(begin.config)
    if recipe.offload.automatic:
        inference = replace(recipe.inference, kv_budget=f"{kv_budget_bytes}B")
        recipe = replace(recipe, offload=replace(recipe.offload, automatic=False, **offload), inference=inference)
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
