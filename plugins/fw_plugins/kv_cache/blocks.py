"""Blocks of a cache, each of the same number of tokens, that sequences share: who has which, and what is in those that are full.

A full block is known by a digest of its tokens and of all before them, and found again by it; what is found is compared, token by token.
It stays known when nobody has it any more, until room is needed: who was left longest ago goes first.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

LEFT = -1
"""In a table: a block that its sequence needs no more."""


@dataclass(frozen=True)
class _Content:
    """What is in a full block.

    Attributes:
        before: digest of the block before it; of the first one, what makes its sequence another than those of the same tokens.
    """

    digest: bytes
    before: bytes
    tokens: tuple[int, ...]


class BlockPool:
    """Gives blocks to sequences.

    Args:
        count: blocks that there are.
        size: tokens of each.
        reuse: whether what is in full blocks is remembered.
    """

    def __init__(self, count: int, size: int, reuse: bool = True) -> None:
        self.count, self.size, self._reuse = count, size, reuse
        self.tables: dict[int, list[int]] = {}
        """Blocks of each sequence, in order."""
        self._free = list(range(count))  # a heap: low ones first, so that memory that was never touched stays so
        self._holders = [0] * count
        self._content: dict[int, _Content] = {}
        self._known: dict[bytes, int] = {}
        self._left: OrderedDict[int, None] = OrderedDict()
        """Blocks that nobody has and whose content is known, who was left first at the beginning."""
        self._trimmed: dict[int, int] = {}
        """Up to which place of its table a sequence has left what it had to."""
        self._chains: dict[int, list[bytes]] = {}
        """Digests of each sequence's full blocks."""

    @property
    def available(self) -> int:
        """Blocks that can be given away."""
        return len(self._free) + len(self._left)

    @property
    def taken(self) -> int:
        """Blocks with something in them, of somebody's or known."""
        return self.count - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """How many hold so many tokens."""
        return -(-tokens // self.size)

    def reserve(self, sequence: int, start: int, end: int) -> list[tuple[int, int]] | None:
        """Blocks for writing at ``start`` … ``end - 1``, of which nobody else has one.

        Returns:
            Blocks to be copied, and where to, before anything is written; None, and nothing has changed, where there is no room.
        """
        table = self.tables.get(sequence, [])
        shared = [at for at in range(start // self.size, min(len(table), self.blocks_for(end))) if self._holders[table[at]] > 1]
        more = max(0, self.blocks_for(end) - len(table))
        if len(shared) + more > self.available:
            return None
        table = self.tables.setdefault(sequence, [])
        copies = []
        for at in shared:
            copies.append((table[at], new := self._take()))
            self._holders[table[at]] -= 1
            table[at] = new
        table += [self._take() for _ in range(more)]
        return copies

    def trim(self, sequence: int, first: int, since: int) -> None:
        """Leave the blocks of positions from ``first`` on and before ``since`` that have no others; for sequences that share nothing by
        content."""
        table = self.tables.get(sequence, [])
        begin, end = max(self.blocks_for(first), self._trimmed.get(sequence, 0)), min(len(table), max(0, since) // self.size)
        for at in range(begin, end):
            if table[at] != LEFT:
                self._leave(table[at])
                table[at] = LEFT
        if end > begin:
            self._trimmed[sequence] = end

    def release(self, sequence: int) -> None:
        """Its blocks are nobody's, but where others have them too; last ones first, since those before them are found without them."""
        self._chains.pop(sequence, None)
        self._trimmed.pop(sequence, None)
        for block in reversed(self.tables.pop(sequence, [])):
            if block != LEFT:
                self._leave(block)

    def fork(self, source: int, target: int, length: int) -> None:
        """``target`` has the blocks of the first ``length`` tokens, too."""
        shared = self.tables[source][: self.blocks_for(length)]
        for block in shared:
            if block != LEFT:
                self._holders[block] += 1
        self.tables[target] = list(shared)
        self._chains[target] = self._chains.get(source, [])[: length // self.size]
        if source in self._trimmed:
            self._trimmed[target] = self._trimmed[source]

    def reuse(self, sequence: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Begin with known blocks; how many tokens are in them, less than all. What is known of another salt is of others."""
        assert sequence not in self.tables, "it has begun"
        if not self._reuse:
            return 0
        table, chain = [], []
        before = salt
        for at in range((len(tokens) - 1) // self.size):
            content = self._of(before, tokens, at)
            block = self._known.get(content.digest)
            if block is None or self._content[block] != content:
                break
            table.append(block)
            chain.append(content.digest)
            before = content.digest
        for block in table:
            self._holders[block] += 1
            self._left.pop(block, None)
        if table:
            self.tables[sequence], self._chains[sequence] = table, chain
        return len(table) * self.size

    def written(self, sequence: int, tokens: Sequence[int], count: int, salt: bytes = b"") -> None:
        """The blocks that the first ``count`` tokens fill are known from now on."""
        if not self._reuse:
            return
        chain = self._chains.setdefault(sequence, [])
        for at in range(len(chain), count // self.size):
            content = self._of(chain[-1] if chain else salt, tokens, at)
            chain.append(content.digest)
            block = self.tables[sequence][at]
            if content.digest not in self._known and block not in self._content:
                self._known[content.digest], self._content[block] = block, content

    def _of(self, before: bytes, tokens: Sequence[int], at: int) -> _Content:
        inside = tuple(tokens[at * self.size : (at + 1) * self.size])
        return _Content(hashlib.blake2b(before + array("q", inside).tobytes(), digest_size=16).digest(), before, inside)

    def _take(self) -> int:
        if self._free:
            block = heapq.heappop(self._free)
        else:
            block, _ = self._left.popitem(last=False)
            del self._known[self._content.pop(block).digest]
        self._holders[block] = 1
        return block

    def _leave(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._content:
            self._left[block] = None
        else:
            heapq.heappush(self._free, block)

    def check(self) -> None:
        """Every block is somebody's, known, or free, and nothing is two of these; for tests."""
        held = [0] * self.count
        for table in self.tables.values():
            for block in table:
                if block != LEFT:
                    held[block] += 1
        assert held == self._holders, "holders are not who has it"
        free, left = set(self._free), set(self._left)
        assert len(free) == len(self._free) and not free & left, "a block is free twice"
        for block in range(self.count):
            assert (held[block] > 0) + (block in free) + (block in left) == 1, f"block {block} is lost, or two things at once"
        assert left <= self._content.keys() and not free & self._content.keys()
        assert {content.digest: block for block, content in self._content.items()} == self._known
