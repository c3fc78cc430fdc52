"""Which rank of an attempt failed first, and what is said of it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fw.launching import outcome, stacks
from fw.launching.rank_log import log_file

_SHOWN_FRAMES = 12
_NCCL_GAVE_UP = re.compile(r"Watchdog caught collective operation timeout|ncclRemoteError|NCCL watchdog thread terminated")

# In this order ranks are to blame.
_BY_ITSELF, _HANGS, _BY_PEER, _ENDED_BY_US = range(4)


@dataclass(frozen=True)
class Fate:
    """How a rank of a failed attempt ended.

    Attributes:
        blame: the lower, the more it is the cause.
        time: when, seconds since the epoch.
        exit_code: of the process; negative for a signal.
        sentence: what happened, after "rank N".
        detail: lines that belong before it: a stack, last words; empty for none.
        trace: the Python traceback, for who debugs.
    """

    rank: int
    blame: int
    time: float
    exit_code: int
    sentence: str
    detail: str
    log: Path | None
    trace: str = ""

    @property
    def is_user_error(self) -> bool:
        """Whether the input was wrong: starting again would not help."""
        return self.exit_code == 2

    @property
    def was_ended(self) -> bool:
        """Whether it ran until the launcher ended it, for no fault of its own."""
        return self.blame == _ENDED_BY_US

    def __str__(self) -> str:
        return f"rank {self.rank} {self.sentence}" + (f"; its log: {self.log}" if self.log else "")


def fates(directory: Path, logs: Path | None, exit_codes: Mapping[int, int], alive: Mapping[int, str]) -> list[Fate]:
    """The ranks of a failed attempt on this host, the one to blame first.

    Args:
        directory: where they left their failures and stacks.
        exit_codes: of the ranks that ended by themselves, those with 0 left out.
        alive: stack files' text of the ranks that had to be ended.
    """
    found = [_ended(directory, logs, rank, code) for rank, code in exit_codes.items()]
    nobody_else = all(fate.blame >= _BY_PEER for fate in found)
    found += [_survivor(logs, rank, text, nobody_else) for rank, text in alive.items()]
    return sorted(found, key=lambda fate: (fate.blame, fate.time))


def _ended(directory: Path, logs: Path | None, rank: int, code: int) -> Fate:
    log = log_file(logs, rank) if logs else None
    if failure := outcome.failure_of(directory, rank):
        blame = _BY_PEER if failure.of_peer else _BY_ITSELF
        return Fate(rank, blame, failure.time, failure.exit_code, f"failed: {failure.message}", "", log, failure.trace)
    text = _text(stacks.stack_file(directory, rank))
    if "Timeout (" in text:
        return _hanging(rank, log, text, 1, waits=stacks.waits_for_others(stacks.main_stack(text)))
    last = _last_line(log)
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = " (which the kernel sends where host memory runs out)" if name == "SIGKILL" else ""
        blame = _BY_PEER if log and _NCCL_GAVE_UP.search(_text(log)) else _BY_ITSELF
        where, stack = _place(rank, stacks.main_stack(text) if stacks.FATAL in text else [])
        if where and not stacks.main_thread_ended(text):
            where = f" in another thread, while the main thread was{where}"
        said = f"{last}\n" if last and not hint else ""
        return Fate(rank, blame, time.time(), code, f"was killed by {name}{hint}{where}", said + stack, log)
    return Fate(rank, _BY_ITSELF, time.time(), code, f"ended with exit code {code}" + (f" after: {last}" if last else ""), "", log)


def _survivor(logs: Path | None, rank: int, text: str, nobody_else: bool) -> Fate:
    log = log_file(logs, rank) if logs else None
    frames = stacks.main_stack(text)
    if nobody_else and frames and not stacks.waits_for_others(frames):
        return _hanging(rank, log, text, -signal.SIGKILL, waits=False)
    return Fate(rank, _ENDED_BY_US, time.time(), -signal.SIGKILL, "was ended after another rank had failed", "", log)


def _hanging(rank: int, log: Path | None, text: str, code: int, waits: bool) -> Fate:
    where, detail = _place(rank, stacks.main_stack(text))
    if log:
        with log.open("a") as file:
            file.write(f"--- stacks, written when this rank was found to hang\n{text}")
    if waits:
        return Fate(rank, _BY_PEER, time.time(), code, "waited in vain for another rank", detail, log)
    return Fate(rank, _HANGS, time.time(), code, f"hangs{where}", detail, log)


def _place(rank: int, frames: list[str]) -> tuple[str, str]:
    """Where a rank is, for its sentence, and its stack, for those who look into it; both empty where nothing is known."""
    if not frames:
        return "", ""
    stack = f"stack of rank {rank}, innermost frame first:\n" + "\n".join(frames[:_SHOWN_FRAMES]) + "\n"
    return " in" + frames[0].replace("  File ", " ", 1), stack


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _last_line(log: Path | None) -> str:
    lines = _text(log).splitlines() if log else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
