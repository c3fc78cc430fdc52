"""Functions that are called in another process, since what goes on in this one would disturb them, or they it."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from fw.errors import RunError
from fw.launching.child import Child, ended, joined

_P = ParamSpec("_P")
_T = TypeVar("_T")
_PATIENCE = 5.0


def computed(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """What it gives there: one of a module, whose arguments and result can be pickled. The process stays for further ones.

    Raises:
        RunError: the process has ended.
    """
    child = _child_of(os.getpid())
    try:
        child.connection.send((function, args, kwargs))
        found: _T = child.connection.recv()
    except (EOFError, OSError):
        raise RunError(f"the process that computes for a plan {child.fate()}") from None
    return found


@functools.cache
def _child_of(process: int) -> Child:
    """A fork of that process has its own."""
    child = Child(__name__)
    atexit.register(child.end, _PATIENCE)
    return child


def main() -> None:
    """In the other process."""
    connection, _ = joined()

    def serve() -> None:
        while True:
            function, args, kwargs = connection.recv()
            connection.send(function(*args, **kwargs))

    ended(connection, serve)
