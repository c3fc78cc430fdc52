"""A history in which one of several periods that are alike stands for many more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fw.meter.account import Block, History, Site
from fw.meter.step_memory import GRADIENTS


class NotRepeatable(Exception):
    """What happens in one period is not what happens in others."""


class Stretch(NamedTuple):
    """A part of a step in which one period computes.

    Attributes:
        pass_: number of the forward or backward that it is part of.
        ascending: whether periods follow one another in the model's order.
        instance: number of the period among those that were run; None for blocks before the first or behind the last.
    """

    pass_: int
    ascending: bool
    instance: int | None


_NOWHERE = Stretch(-1, True, None)


Segments = Sequence[tuple[int, Stretch | None]]
"""Number of changes before each, and what it is; None for what is in no block."""


@dataclass
class Copies:
    """For blocks of the period that stands for others, those that the others would have.

    Attributes:
        count: of periods left out.
        paths: for each, modules of the period that stands for it, or near it, and what they are there.
    """

    count: int
    paths: Sequence[Mapping[str, str]] = ()
    _of: dict[Block, list[Block]] = field(default_factory=dict)

    def of(self, block: Block) -> list[Block]:
        """One for each period left out, in the model's order."""
        if block not in self._of:
            self._of[block] = [replace(block, site=self._site(block, number)) for number in range(self.count)]
        return self._of[block]

    def _site(self, block: Block, number: int) -> Site:
        module = block.site.module
        return block.site._replace(module=self.paths[number].get(module, module)) if self.paths else block.site

    def agree(self) -> None:
        """All are for what the originals are for."""
        for block, copies in self._of.items():
            for copy in copies:
                copy.category, copy.passing = block.category, block.passing


def expand(history: History, segments: Segments, template: int, copies: Copies, bound: set[Block]) -> History:
    """The history with periods behind ``template`` that do what it does.

    A period frees memory that it took itself, or that one some periods away took; what is behind it frees does so for each.

    Args:
        bound: copies whose end is in the history already.

    Raises:
        NotRepeatable: the period frees what came from elsewhere, or others do not do the same.
    """
    return _Expansion(history, segments, template, copies, bound).run()


class _Expansion:
    def __init__(self, history: History, segments: Segments, template: int, copies: Copies, bound: set[Block]) -> None:
        self._history, self._template, self._copies, self._bound = history, template, copies, bound
        ends = [start for start, _ in segments[1:]] + [len(history.changes)]
        self._segments = [(start, end, stretch) for (start, stretch), end in zip(segments, ends, strict=True) if end > start or stretch]
        self._taken: dict[Stretch, list[Block]] = defaultdict(list)
        self._born: dict[Block, tuple[Stretch, int]] = {}
        for start, end, stretch in self._segments:
            if stretch is None:
                continue
            for block, sign in history.changes[start:end]:
                if sign > 0 and block.nbytes:
                    self._born[block] = stretch, len(self._taken[stretch])
                    self._taken[stretch].append(block)
        self._out = History(before=history.before)
        self._position = [0] * (len(history.changes) + 1)

    def run(self) -> History:
        if self._segments and self._segments[0][0] != 0:
            raise NotRepeatable("what comes first is in no segment")
        for number, (start, end, stretch) in enumerate(self._segments):
            stands = stretch is not None and stretch.instance == self._template
            if stands and stretch and not stretch.ascending and self._first_of(number):
                self._leave_out(stretch)
            for index in range(start, end):
                self._position[index] = len(self._out.changes)
                block, sign = self._history.changes[index]
                if not block.nbytes:
                    continue
                if sign > 0:
                    self._out.came(block)
                elif stretch is None or stretch.instance is None:
                    self._freed_outside(block)
                else:
                    self._out.went(self._freed(block, stretch.instance, self._expanded(stretch.instance)))
            if stands and stretch and stretch.ascending and self._last_of(number):
                self._leave_out(stretch)
        self._position[len(self._history.changes)] = len(self._out.changes)
        self._out.costs += [(self._position[index], cost) for index, cost in self._history.costs]
        self._out.marks = [(self._position[index], name) for index, name in self._history.marks]
        self._verify()
        return self._out

    def _first_of(self, number: int) -> bool:
        return number == 0 or self._segments[number - 1][2] != self._segments[number][2]

    def _last_of(self, number: int) -> bool:
        return number + 1 == len(self._segments) or self._segments[number + 1][2] != self._segments[number][2]

    def _leave_out(self, stretch: Stretch) -> None:
        """What the periods that were left out would do."""
        numbers = range(1, self._copies.count + 1)
        parts = [(start, end) for start, end, other in self._segments if other == stretch]
        changes = [change for start, end in parts for change in self._history.changes[start:end]]
        costs = [cost for start, end in parts for index, cost in self._history.costs if start < index <= end]
        for number in numbers if stretch.ascending else reversed(numbers):
            self._out.costs += [(len(self._out.changes), cost) for cost in costs]
            for block, sign in changes:
                if not block.nbytes:
                    continue
                if sign > 0:
                    self._out.came(self._copies.of(block)[number - 1])
                else:
                    self._out.went(self._freed(block, self._template, self._template + number))

    def _expanded(self, instance: int) -> int:
        """Its number where none is left out."""
        return instance if instance <= self._template else instance + self._copies.count

    def _freed(self, block: Block, instance: int, at: int) -> Block:
        """What the period numbered ``at`` frees where ``instance``, of those that were run, frees ``block``."""
        source, ordinal = self._born.get(block, (_NOWHERE, 0))
        if source.instance is None:
            if instance == self._template:
                raise NotRepeatable("a period frees what is of none")
            return block
        target = at + source.instance - instance
        if target <= self._template:
            return self._like(block, source._replace(instance=target), ordinal)
        if target > self._template + self._copies.count:
            return self._like(block, source._replace(instance=target - self._copies.count), ordinal)
        of_template = self._like(block, source._replace(instance=self._template), ordinal)
        return self._copies.of(of_template)[target - self._template - 1]

    def _like(self, block: Block, stretch: Stretch, ordinal: int) -> Block:
        taken = self._taken.get(stretch, [])
        if ordinal >= len(taken) or taken[ordinal].nbytes != block.nbytes:
            raise NotRepeatable("periods take different memory")
        return taken[ordinal]

    def _freed_outside(self, block: Block) -> None:
        self._out.went(block)
        if block in self._born and self._born[block][0].instance == self._template:
            for copy in self._copies.of(block):
                if copy not in self._bound:
                    self._out.went(copy)

    def _verify(self) -> None:
        """Nothing is freed that is not there, and what stays is what stayed."""
        there = set(self._history.before)
        for block, sign in self._out.changes:
            if sign > 0:
                there.add(block)
            elif block in there:
                there.remove(block)
            else:
                raise NotRepeatable("memory is freed before it is taken")
        for block in there:
            if self._born.get(block, (_NOWHERE, 0))[0].instance is not None and block.category != GRADIENTS:
                raise NotRepeatable("a period leaves memory behind")
