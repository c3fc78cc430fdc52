"""Memory that comes and goes, summed up over time by what it is for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

UNNAMED = "temporary"
"""Category of memory that nobody gave another."""


class Site(NamedTuple):
    """Where in a step memory is made: a module's path, as ``layers.3``, and the phase."""

    module: str = ""
    phase: str = ""

    def __str__(self) -> str:
        return " of ".join(filter(None, (self.phase, self.module))) or "no known module"


_NOWHERE = Site()


@dataclass(eq=False)
class Block:
    """Memory from its allocation to its end."""

    nbytes: int
    category: str = UNNAMED
    optional: bool = False
    """Whether it may be gone before its end is seen: what a backend needs until its own thread is done."""
    passing: bool = False
    """Whether the category is that of what ranks exchange, until it turns out to be something else: a gradient that was received."""
    stream: int = 0
    """Of a GPU, by a number: the caching allocator gives memory of one stream to no other. 0 is where computation goes on."""
    site: Site = _NOWHERE
    address: int = 0
    """0 where it has none."""
    line: str = ""
    """Of the Python program that made it; empty where nobody looked."""

    def name(self, category: str) -> None:
        """It belongs to ``category``, unless it has one."""
        if self.category == UNNAMED or self.passing:
            self.category, self.passing = category, False

    def exchange(self, category: str) -> None:
        """It is sent or received, and belongs to ``category`` as long as nobody knows better."""
        if self.category == UNNAMED:
            self.category, self.passing = category, True


@dataclass(frozen=True)
class Account:
    """What a stretch of time took.

    Attributes:
        peak_bytes: the most at any time, if all that is optional stays as long as it may.
        low_bytes: the most, if all of that is gone at once.
        peak_after: the last mark before that; empty for none.
        at_peak: its parts by category.
        most: the most of each category at any time.
        phases: the parts at the highest moment after each mark, of all marks of that name; before the first, by the empty name.
    """

    peak_bytes: int
    low_bytes: int
    peak_after: str
    at_peak: dict[str, int]
    most: dict[str, int]
    phases: dict[str, dict[str, int]]


@dataclass
class History:
    """Blocks as they came and went.

    Attributes:
        before: blocks that were there at the beginning.
        changes: blocks in the order of time, with 1 where one comes and -1 where it goes.
        marks: number of changes before each, and its name.
        costs: number of changes before each, and what an operator cost there, where that was asked for.
        emptied: number of changes before each time that an allocator gave back what it kept and nobody used.
    """

    before: list[Block] = field(default_factory=list)
    changes: list[tuple[Block, int]] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    costs: list[tuple[int, Any]] = field(default_factory=list)
    emptied: list[int] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """From here on it is ``name``."""
        self.marks.append((len(self.changes), name))

    def came(self, block: Block) -> Block:
        """It is there from now on."""
        self.changes.append((block, 1))
        return block

    def went(self, block: Block) -> None:
        """It is no more."""
        self.changes.append((block, -1))

    @property
    def left(self) -> list[Block]:
        """Those that came and are there at the end, in the order of time."""
        gone = {block for block, sign in self.changes if sign < 0}
        return [block for block, sign in self.changes if sign > 0 and block not in gone]

    def account(self, parts: Mapping[str, str] | None = None) -> Account:
        """By the categories that blocks have now, or by what ``parts`` says these are part of."""
        by_category = self.over_time()
        if parts is not None:
            whole: dict[str, NDArray[np.int64]] = {}
            for category, line in by_category.items():
                part = parts[category]
                whole[part] = whole[part] + line if part in whole else line
            by_category = whole
        total = sum(by_category.values(), np.zeros(len(self.changes) + 1, np.int64))
        peak = int(total.argmax())
        begins = np.array([changes for changes, _ in self.marks], np.int64)
        last = np.searchsorted(begins, np.arange(len(total)))  # the number of marks before each point
        names = ["", *(name for _, name in self.marks)]
        highest: dict[str, int] = {}
        for number, name in enumerate(names):
            points = np.flatnonzero(last == number)
            if len(points):
                at = int(points[total[points].argmax()])
                highest[name] = max(highest.get(name, at), at, key=total.__getitem__)
        optional = self._optional()
        return Account(
            int(total[peak]),
            int((total - optional).max()),
            names[int(last[peak])],
            {category: int(line[peak]) for category, line in by_category.items()},
            {category: int(line.max()) for category, line in by_category.items()},
            {name: {category: int(line[at]) for category, line in by_category.items()} for name, at in highest.items()},
        )

    def _optional(self) -> NDArray[np.int64]:
        steps = np.zeros(len(self.changes) + 1, np.int64)
        for number, (block, sign) in enumerate(self.changes, start=1):
            if block.optional:
                steps[number] = sign * block.nbytes
        return steps.cumsum()

    def over_time(self) -> dict[str, NDArray[np.int64]]:
        """For each category its bytes at the beginning and after each change ``[len(changes) + 1]``."""
        categories = {block.category: None for block in self.before} | {block.category: None for block, _ in self.changes}
        steps = {category: np.zeros(len(self.changes) + 1, np.int64) for category in categories}
        for block in self.before:
            steps[block.category][0] += block.nbytes
        for number, (block, sign) in enumerate(self.changes, start=1):
            steps[block.category][number] = sign * block.nbytes
        return {category: line.cumsum() for category, line in steps.items()}


class Recorder(ABC):
    """Knows what memory comes and goes while it records, and is told what it is for."""

    @abstractmethod
    def mark(self, name: str) -> None:
        """What follows is ``name``."""

    @abstractmethod
    def enter(self, module: str) -> None:
        """What follows is made in ``module``, a path; it counts for the site only."""

    @abstractmethod
    def known(self, category: str, tensors: Iterable[Tensor]) -> None:
        """These were allocated before, and belong to ``category``; memory that was named before keeps its name."""

    @abstractmethod
    def known_rest(self, category: str) -> None:
        """All else that was allocated before belongs to ``category``."""

    @abstractmethod
    def name(self, category: str, tensors: Iterable[Tensor]) -> None:
        """What these tensors lie in belongs to ``category``, unless it has one."""

    @abstractmethod
    def name_rest(self, category: str) -> None:
        """All that is allocated now and has no category belongs to ``category``."""

    @property
    @abstractmethod
    def history(self) -> History:
        """What there is to tell, once the recording has ended."""


@dataclass(frozen=True)
class Rules:
    """What memory is for by the operation that makes or takes it.

    Attributes:
        copies: category → category of what is converted from it to another dtype or device.
        exchanged: category of what ranks send and receive, where it has none.
        unknown: category of what an allocator takes besides what was asked for.
    """

    copies: Mapping[str, str] = field(default_factory=dict)
    exchanged: str = ""
    unknown: str = UNNAMED

    def is_exchange(self, operation: str) -> bool:
        """Whether ``namespace::name`` is a collective of torch.distributed, whose arguments ranks exchange."""
        return bool(self.exchanged) and operation.startswith((_GIVEN, _MAKES))


_GIVEN, _MAKES = "c10d::", "_c10d_functional::"


def is_given(operation: str) -> bool:
    """Whether ``namespace::name`` is a collective that is given what it fills: all it allocates is its backend's own."""
    return operation.startswith(_GIVEN)
