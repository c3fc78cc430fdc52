"""Functions of the compiled library, and who hears of their calls."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fw.kernels.build import NotCompiled, follow_torch, library

Listener = Callable[["Kernel", Sequence[Any]], None]


class _Hearing(threading.local):
    listener: Listener | None = None


_hearing = _Hearing()


class Kernel:
    """A function that gives nothing back.

    Args:
        arguments: ``c_void_p``, ``c_long`` or ``c_float`` each.
        flags: of the library, further ones for the compiler.
    """

    def __init__(self, name: str, arguments: Sequence[type], flags: Sequence[str] = ()) -> None:
        self.name, self.arguments, self._flags = name, arguments, flags

    @functools.cached_property
    def _function(self) -> Callable[..., None]:
        found: Any = getattr(library(*self._flags), self.name)
        found.restype, found.argtypes = None, self.arguments
        return found

    @functools.cached_property
    def with_words(self) -> int:
        """Where the function begins that takes all arguments as words: numbers and addresses of 64 bits, numbers with a point in double."""
        found = ctypes.cast(getattr(library(*self._flags), f"{self.name}_again"), ctypes.c_void_p).value
        assert found is not None
        return found

    @functools.cached_property
    def available(self) -> bool:
        """Whether it can be had on this machine."""
        try:
            return self._function is not None
        except NotCompiled:
            return False

    def __call__(self, *given: Any) -> None:
        """With addresses, numbers, or arrays and structures of ctypes.

        Raises:
            NotCompiled: with the reason.
        """
        function = self._function
        follow_torch()
        function(*given)
        if _hearing.listener is not None:
            _hearing.listener(self, given)


@contextmanager
def heard(listener: Listener) -> Iterator[None]:
    """Calls that this thread makes meanwhile are told, after each."""
    assert _hearing.listener is None, "one listens at a time"
    _hearing.listener = listener
    try:
        yield
    finally:
        _hearing.listener = None
