"""A cache of keys and values that others have their part of: what is asked of it is asked of theirs, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fw.kinds.kv_cache import KVCache, Places, Stretch


class Mirrored(KVCache):
    """A cache whose calls others are told of, by name and arguments, to make them on theirs."""

    def __init__(self, cache: KVCache, tell: Callable[[tuple[Any, ...]], None]) -> None:
        self._cache, self._tell = cache, tell
        self._known: dict[int, int] = {}

    @property
    def capacity(self) -> int:
        """Of each."""
        return self._cache.capacity

    @property
    def live_bytes(self) -> int:
        """Of this one."""
        return self._cache.live_bytes

    @property
    def used_bytes(self) -> int:
        """Of this one."""
        return self._cache.used_bytes

    def reserve(self, sequence: int, start: int, end: int) -> bool:
        """On all; they are as full."""
        self._tell(("reserve", sequence, start, end))
        return self._cache.reserve(sequence, start, end)

    def release(self, sequence: int) -> None:
        """On all, others with the next step."""
        self._known.pop(sequence, None)
        self._tell(("release", sequence))
        self._cache.release(sequence)

    def fork(self, source: int, target: int, length: int) -> bool:
        """On all."""
        self._tell(("fork", source, target, length))
        return self._cache.fork(source, target, length)

    def reuse(self, sequence: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        """On all."""
        self._tell(("reuse", sequence, list(tokens), salt))
        return self._cache.reuse(sequence, tokens, salt)

    def written(self, sequence: int, tokens: Sequence[int], count: int, salt: bytes = b"") -> None:
        """On all; others know those that they have been told before."""
        known = self._known.get(sequence, 0)
        self._known[sequence] = max(known, count)
        self._tell(("written", sequence, known, list(tokens[known:count]), count, salt))
        self._cache.written(sequence, tokens, count, salt)

    def places(self, lengths: Sequence[int]) -> Places | None:
        """Whoever computes has the cache itself."""
        return self._cache.places(lengths)

    def begin(self, stretches: Sequence[Stretch], places: Places | None = None) -> None:
        """As above."""
        self._cache.begin(stretches, places)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """As above."""
        return self._cache.attend(*args, **kwargs)


class Echo:
    """Makes the calls of a mirrored cache on this rank's."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._tokens: dict[int, list[int]] = {}

    def make(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """One after another."""
        for name, sequence, *rest in calls:
            if name == "written":
                known, more, count, salt = rest
                tokens = self._tokens.setdefault(sequence, [])
                tokens[known:] = more
                self._cache.written(sequence, tokens, count, salt)
                continue
            if name == "release":
                self._tokens.pop(sequence, None)
            getattr(self._cache, name)(sequence, *rest)
