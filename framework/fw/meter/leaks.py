"""What steps leave behind: tensors that are made in one and there at its end, and what grows from step to step."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import FrameType, GeneratorType
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fw.kinds.sharding import KeptTensors
from fw.meter.account import Block, Site
from fw.meter.earlier import in_one_piece
from fw.meter.findings import GROWING, KEPT, Finding
from fw.meter.step_memory import EXCHANGED, INPUTS

LEAST_BYTES = 1024
"""Of a site: less than that take losses and norms that are kept until they are logged."""
_SHOWN = 3
"""Lines and holders that are named, at most."""
_LOOKED_AT = 4
"""Tensors of a site whose holders are looked for, which takes a look at everything that there is."""


@dataclass(frozen=True)
class _Left:
    """What a step has left behind, and who can tell whether it is still there (None where Python knows no tensor of it)."""

    block: Block
    storage: StorageWeakRef | None


class LeakCheck:
    """Looks at what is there at the end of each of some steps that follow one another."""

    def __init__(self) -> None:
        self._left: list[list[_Left]] = []
        self._alive: list[Counter[Site]] = []
        """By step, what it and those before have left and was there at its end."""
        self._holders: dict[Site, list[str]] = {}

    @property
    def suspects(self) -> bool:
        """Whether the last step has left something that nobody owns up to; then the next one is worth a closer look."""
        return bool(self._left) and bool(self._groups(self._left[-1]))

    def after(self, left: Iterable[Block], kept: KeptTensors) -> None:
        """A step has ended.

        Args:
            left: what it has made and is there, by its recording.
            kept: what is there between two steps for a reason.
        """
        own = {t.untyped_storage().data_ptr() for part in (kept.weights, kept.gradients, kept.optimizer, kept.buffers) for t in part}
        blocks = {block.address: block for block in left if block.address not in own and block.category != INPUTS}
        known = _tensors_at(blocks)
        # A backend's own is dropped by a thread of its own, when it comes to it.
        found = [
            _Left(block, StorageWeakRef(known[address].untyped_storage()) if address in known else None)
            for address, block in blocks.items()
            if address in known or block.category != EXCHANGED
        ]
        taken = set(blocks)
        for step in self._left:  # of what Python does not know: its address is given out again
            step[:] = [each for each in step if each.storage is not None or each.block.address not in taken]
        self._left.append(found)
        alive: Counter[Site] = Counter()
        for each in (each for step in self._left for each in step):
            if each.storage is None or not each.storage.expired():
                alive[each.block.site] += each.block.nbytes
        self._alive.append(alive)
        self._holders = {
            site: _holders([known[each.block.address] for each in group if each.block.address in known], {id(known)})
            for site, group in self._groups(found).items()
        }

    def findings(self) -> list[Finding]:
        """By what the last step has left: with three steps or more, what grows is told from what is replaced."""
        if not self._left:
            return []
        found = []
        for site, group in self._groups(self._left[-1]).items():
            sizes = [alive[site] for alive in self._alive]
            grows = len(sizes) > 2 and all(later - earlier >= LEAST_BYTES for earlier, later in zip(sizes, sizes[1:], strict=False))
            lines: Counter[str] = Counter()
            for each in group:
                lines[each.block.line] += each.block.nbytes
            named = [line for line, _ in lines.most_common(_SHOWN) if line]
            nbytes = sum(each.block.nbytes for each in group)
            found.append(Finding(GROWING if grows else KEPT, nbytes, len(group), str(site), named, self._holders.get(site, [])))
        return found

    @staticmethod
    def _groups(left: Sequence[_Left]) -> dict[Site, list[_Left]]:
        """By site, those that are large enough together."""
        groups: dict[Site, list[_Left]] = defaultdict(list)
        for each in left:
            groups[each.block.site].append(each)
        return {site: group for site, group in groups.items() if sum(each.block.nbytes for each in group) >= LEAST_BYTES}


def _tensors_at(blocks: dict[int, Block]) -> dict[int, Tensor]:
    """A tensor of each block that Python knows of."""
    found: dict[int, Tensor] = {}
    if blocks:
        for each in in_one_piece():
            found.setdefault(each.untyped_storage().data_ptr(), each)
    return {address: found[address] for address in blocks if address in found}


def _holders(tensors: Sequence[Tensor], mine: set[int]) -> list[str]:
    """Who has the first of them, in words; nobody where no object or module has them or a container of theirs by name."""
    mine = {*mine, id(tensors)}  # and no container is made here that would have them too
    words: dict[str, None] = {}
    for number in range(min(len(tensors), _LOOKED_AT)):
        if word := _holder(tensors[number], mine):
            words[word] = None
    return list(words)[:_SHOWN]


def _holder(tensor: Tensor, mine: set[int]) -> str:
    """Through containers in containers."""
    level: list[tuple[Any, str]] = [(tensor, "")]
    for _ in range(4):
        above: list[tuple[Any, str]] = []
        for value, inside in level[:_LOOKED_AT]:
            for owner in gc.get_referrers(value):
                if id(owner) in mine or owner is level or isinstance(owner, (FrameType, GeneratorType)):
                    continue
                if name := _name(owner, value):
                    return f"{inside}{name}"
                # the pairs of this search have it too
                if isinstance(owner, (list, set, dict, deque)) or (isinstance(owner, tuple) and owner[1:] != (inside,)):
                    above.append((owner, f"a {type(owner).__name__} in "))
        level = above
    return ""


def _name(owner: Any, value: Any) -> str:
    """What a module or an object calls it; empty where ``owner`` is neither or has no name for it."""
    values = owner if isinstance(owner, dict) else getattr(owner, "__dict__", {})
    key = next((key for key, each in values.items() if each is value and isinstance(key, str)), None)
    if key is None:
        return ""
    if not isinstance(owner, dict):
        return f"{type(owner).__module__}.{type(owner).__qualname__}.{key}"
    if "__name__" in owner and "__builtins__" in owner:
        return f"{owner['__name__']}.{key}"
    return next((_name(each, value) for each in gc.get_referrers(owner) if getattr(each, "__dict__", None) is owner), "")
