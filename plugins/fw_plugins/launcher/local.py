"""Ranks of this host, started by torchrun's elastic agent inside the calling process."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fw.config import LaunchSection
from fw.errors import EXIT_FAILED, EXIT_OK, EXIT_USER
from fw.kinds.launcher import OUTCOME_DIR, LauncherPlugin

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LocalLauncher(LauncherPlugin):
    """torchrun's elastic agent in this process; several hosts each run the same command."""

    api = 1

    def launch(self, command: Sequence[str], launch: LaunchSection) -> int:
        """Start, pass signals on, wait, and say how it ended."""
        with _environment_as_before():
            return _launch(command, launch)


def _launch(command: Sequence[str], launch: LaunchSection) -> int:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # ranks tell their own errors
    if launch.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(launch.threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // launch.devices)))
    config = LaunchConfig(
        min_nodes=launch.nodes,
        max_nodes=launch.nodes,
        nproc_per_node=launch.devices,
        run_id="fw",
        rdzv_backend="c10d",
        rdzv_endpoint=launch.rendezvous or "localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        **_leave_signals_alone(),
    )
    with tempfile.TemporaryDirectory(prefix="fw-outcome-") as outcomes, _forward_signals():
        os.environ[OUTCOME_DIR] = outcomes
        try:
            elastic_launch(config, command[0])(*command[1:])
        except ChildFailedError as error:
            codes = [failure.exitcode for failure in error.failures.values()]
            return EXIT_USER if EXIT_USER in codes else EXIT_FAILED
        codes = [int(path.read_text()) for path in Path(outcomes).iterdir()]
        return max(codes, default=EXIT_OK)


def _leave_signals_alone() -> dict[str, Any]:
    """Stop signals reach the ranks through our own handler: the agent's would end them without waiting for the save."""
    if "signals_to_handle" in {field.name for field in fields(LaunchConfig)}:
        return {"signals_to_handle": "SIGQUIT"}
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # torch before the option
    return {}


@contextmanager
def _environment_as_before() -> Iterator[None]:
    """The ranks inherit this process's environment; what is set for them must not stay for whatever it does next."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _forward_signals() -> Iterator[None]:
    """Pass stop signals on to the children of this process, once each; the ranks save and end by themselves."""

    def forward(number: int, frame: FrameType | None) -> None:
        for child in _children():
            try:
                os.kill(child, number)
            except ProcessLookupError:
                continue

    before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {n: signal.signal(n, forward) for n in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> list[int]:
    """Process ids of the direct children (Linux)."""
    found: list[int] = []
    for task in Path("/proc/self/task").glob("*/children"):
        found.extend(int(pid) for pid in task.read_text().split())
    return found
