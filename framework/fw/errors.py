"""The errors fw raises on purpose. Each is one sentence that says where and what to do; the CLI prints it without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

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
