"""The errors fw raises on purpose. Each is one sentence that says where and what to do; the CLI prints it without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SAID = 300

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_REQUEUE = 75  # EX_TEMPFAIL: saved after preemption, run me again
EXIT_INTERRUPTED = 130  # 128 + SIGINT, after saving


class FwError(Exception):
    """Base of every error fw raises on purpose; ``exit_code`` is what the command line returns."""

    exit_code = EXIT_FAILED


class UserError(FwError):
    """The user's input was wrong: a config, an option, a path."""

    exit_code = EXIT_USER


class RunError(FwError):
    """The input was fine and the run failed."""

    exit_code = EXIT_FAILED


class PeerError(RunError):
    """Another rank died or did not answer; the cause lies there."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the closest candidate, or an empty string where none is close."""
    close = difflib.get_close_matches(word, sorted(candidates), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def describe(error: BaseException) -> str:
    """An error in a line: our own sentence, the system's word on a file, or the class and what it says."""
    if isinstance(error, FwError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:_SAID]}"
