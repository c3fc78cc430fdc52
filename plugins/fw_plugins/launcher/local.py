"""Ranks of this host, started by torchrun's elastic agent inside the calling process."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from fw.api import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_REQUEUE, EXIT_USER, LauncherPlugin, LaunchSection, Prepare, RunError
from fw.api.launching import Fate, outcome, threads_of_rank
from fw_plugins.launcher import rendezvous as meeting
from fw_plugins.launcher.agent import RankAgent

_STOP_SIGNALS = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_REQUEUE, signal.SIGUSR1: EXIT_REQUEUE}


class _StoppedBeforeRanks(Exception):
    """Asked to stop where there is nobody to pass that on to, while the hosts wait for each other."""


class LocalLauncher(LauncherPlugin):
    """torchrun's elastic agent in this process; several hosts each run the same command."""

    api = 1
    needs_rendezvous = True

    def launch(self, command: Sequence[str], launch: LaunchSection, prepare: Prepare) -> int:
        """Start, pass signals on, restart what failed, wait, and say how it ended."""
        elastic = logging.getLogger("torch.distributed.elastic")
        before = elastic.level
        elastic.setLevel(logging.CRITICAL)  # what failed is told here
        try:
            with _environment_as_before():
                return _launch(command, launch, prepare)
        finally:
            elastic.setLevel(before)


def _launch(command: Sequence[str], launch: LaunchSection, prepare: Prepare) -> int:
    if launch.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(launch.threads)
    elif launch.devices > 1:  # a single one takes torch's own
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_rank(launch.devices, None)))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # stops reach the ranks through our handler, which waits for their save
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # each attempt gets a store of its own, empty of the last one's addresses
    with tempfile.TemporaryDirectory(prefix="fw-outcome-") as outcomes, _forward_signals() as asked:
        try:
            return _run(command, launch, prepare, Path(outcomes), asked)
        except _StoppedBeforeRanks:
            return _STOP_SIGNALS[signal.Signals(asked[0])]


def _run(command: Sequence[str], launch: LaunchSection, prepare: Prepare, outcomes: Path, asked: Sequence[int]) -> int:
    rendezvous = meeting.join(launch)
    spec = WorkerSpec(
        role="fw",
        local_world_size=launch.devices,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=rendezvous,
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
    )
    agent = RankAgent(spec, outcomes, prepare, _tell, lambda: bool(asked), launch.join_timeout)
    reachable = True
    try:
        result: RunResult = agent.run()
    except RendezvousConnectionError:
        reachable = False
        return _left_alone(agent.fates, "the rendezvous host cannot be reached any more; it has ended or the network is down")
    except RendezvousClosedError:
        return _left_alone(agent.fates, "another host has ended the run")
    except RendezvousTimeoutError:
        raise RunError(f"not all {launch.nodes} hosts joined within launch.join_timeout={launch.join_timeout} s") from None
    except RendezvousError as error:
        raise RunError(f"rendezvous failed: {error}") from error
    finally:
        if reachable:
            rendezvous.shutdown()
    if result.is_failed():
        return _failed(agent.fates, asked)
    return max(outcome.stops(agent.outcomes), default=EXIT_OK)


def _tell(fates: list[Fate], restarts: bool) -> None:
    """The rank to blame, before any other, then those that it took along."""
    if not fates:
        return
    first, *others = fates
    if first.is_user_error:
        print(f"fw: error: {first.sentence.removeprefix('failed: ')}", file=sys.stderr, flush=True)
        return
    print(first.detail + (first.trace if "FW_DEBUG" in os.environ else ""), end="", file=sys.stderr)
    more = f" ({len(others)} other{'s' * (len(others) > 1)} of this host ended after it)" if others else ""
    print(f"fw: {'warning' if restarts else 'error'}: {first}{more}", file=sys.stderr, flush=True)


def _left_alone(fates: list[Fate], why: str) -> int:
    """The other hosts are gone: what the ranks of this one said of it, else why the agent gave up."""
    _tell([fate for fate in fates if not fate.was_ended], restarts=False)
    print(f"fw: error: {why}", file=sys.stderr, flush=True)
    return EXIT_FAILED


def _failed(fates: list[Fate], asked: Sequence[int]) -> int:
    if asked and fates and fates[0].exit_code in (-asked[0], _STOP_SIGNALS[signal.Signals(asked[0])]):
        return _STOP_SIGNALS[signal.Signals(asked[0])]  # stopped before training began: nothing to save, and nothing failed
    return EXIT_USER if fates and fates[0].is_user_error else EXIT_FAILED


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
def _forward_signals() -> Iterator[list[int]]:
    """Pass stop signals on to the children of this process, once each; the ranks save and end by themselves. Signals are the main thread's:
    in another nobody hears of them."""
    asked: list[int] = []
    there_before = _children()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        children = _children() - there_before  # who calls this from Python may have others
        if not children:
            raise _StoppedBeforeRanks
        for child in children:
            try:
                os.kill(child, number)
            except ProcessLookupError:
                continue

    before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {n: signal.signal(n, forward) for n in _STOP_SIGNALS}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _children() -> set[int]:
    """Process ids of the direct children (Linux)."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended by now
            found.update(int(pid) for pid in task.read_text().split())
    return found
