"""Tensors that forward has put elsewhere, brought back in backward before they are asked for."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator

from torch import Tensor


class Fetch(ABC):
    """Values on their way back."""

    @abstractmethod
    def result(self) -> Tensor:
        """The values on the device they came from, laid out as they were. Waits for them; may be called again.

        Raises:
            RunError: they cannot be had.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Nobody will ask for them."""


class Stored(ABC):
    """The values of a tensor on another tier, for as long as something refers to this."""

    def settle(self) -> None:  # noqa: B027 - most hold no tensor
        """Give up the tensor itself, where it is held until it has been copied away."""

    @abstractmethod
    def fetch(self) -> Fetch:
        """Begin to bring the values back; any number of times."""


class Parcel:
    """What autograd keeps in a tensor's place.

    A tensor that several operations save is one parcel: it is brought back once, and stays until each of them has had it.
    """

    def __init__(self, visit: Visit, stored: Stored) -> None:
        self.visit, self.stored = visit, stored
        self.uses = 1
        self._taken = 0
        self._fetch: Fetch | None = None

    def begin(self) -> None:
        """Begin to bring the values back, unless that has begun."""
        if self._fetch is None:
            self._fetch = self.stored.fetch()

    def take(self) -> Tensor:
        """The values, for one of the operations."""
        self.begin()
        assert self._fetch is not None
        value = self._fetch.result()
        self._taken += 1
        if self._taken >= self.uses:  # a second backward brings them back again
            self._fetch, self._taken = None, 0
        return value

    def forget(self) -> None:
        """Let go of what has been brought back and not been asked for by all."""
        if self._fetch is not None:
            self._fetch.cancel()
        self._fetch, self._taken = None, 0

    def __del__(self) -> None:
        self.forget()


class Visit:
    """One forward of one block: its parcels in the order in which they were stored. Autograd's graph owns them."""

    def __init__(self, number: int, before: Visit | None) -> None:
        self.number = number
        self._before = None if before is None else weakref.ref(before)
        self._parcels: list[weakref.ref[Parcel]] = []

    def add(self, stored: Stored) -> Parcel:
        """A parcel of this visit."""
        parcel = Parcel(self, stored)
        self._parcels.append(weakref.ref(parcel))
        return parcel

    def newest_first(self) -> Iterator[Parcel]:
        """Those there still are, in the order in which backward asks for them."""
        return (parcel for ref in reversed(self._parcels) if (parcel := ref()) is not None)

    def with_earlier(self, count: int) -> list[Visit]:
        """This one, and up to ``count`` of the same forward before it, the nearest first."""
        found, last = [self], self
        for _ in range(count):
            earlier = None if last._before is None else last._before()
            if earlier is None:
                break
            found.append(last := earlier)
        return found


class Prefetcher:
    """Knows in which order blocks stored what, and fetches ahead in reverse.

    When backward first asks for something of a block, all that this block and the ``ahead`` blocks before it have stored begins to come
    back; what other blocks have brought back is let go. So no more than ``ahead`` + 1 blocks' activations are back at a time. With 0, each
    tensor is fetched when it is asked for.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._leaving: deque[weakref.ref[Visit]] = deque()
        self._near: list[weakref.ref[Visit]] = []

    def visit(self, number: int) -> Visit:
        """A forward of block ``number`` begins.

        Tensors of the block before the last one are given up, which were held for their copy: no more than two blocks' worth wait for it.
        """
        while len(self._leaving) > 1:
            if (settling := self._leaving.popleft()()) is not None:
                for parcel in settling.newest_first():
                    parcel.stored.settle()
        last = self._leaving[-1]() if self._leaving else None
        visit = Visit(number, last if last is not None and last.number < number else None)
        self._leaving.append(weakref.ref(visit))
        return visit

    def take(self, parcel: Parcel) -> Tensor:
        """The values of a parcel, which one operation's backward asks for."""
        if not self._near or self._near[0]() is not parcel.visit:
            self._arrive(parcel.visit)
        return parcel.take()

    def _arrive(self, visit: Visit) -> None:
        near = visit.with_earlier(self._ahead)
        for ref in self._near:
            if (left := ref()) is not None and left not in near:
                for parcel in left.newest_first():
                    parcel.forget()
        self._near = [weakref.ref(one) for one in near]
        if self._ahead:
            for one in near:
                for parcel in one.newest_first():
                    parcel.begin()
