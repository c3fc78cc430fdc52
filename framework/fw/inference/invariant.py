"""Steps in which what a token gets does not depend on what else is computed (``inference.batch_invariant``).

A model sees one number of rows, always: a step is divided into as many tiles as it takes, one after another, and the last one is filled up.
So torch is given the same shapes whatever the company is, and what it makes of a row depends on the row alone, if only not on the row's
place, which is tried out when a model is loaded. Sequences meet in attention alone, and there the cache sees to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fw.errors import UserError
from fw.inference.cached import Piece, Runner
from fw.kernels.fixed_rows import fixed_rows
from fw.kinds.kv_cache import KVCache, KVCachePlugin, Stretch
from fw.kinds.model import CausalLM
from fw.planned import is_gpu

_ROWS, _ROWS_ON_GPU = 16, 64
"""With more, an answer alone waits for rows that nobody wants; with fewer, weights are read more often. A GPU reads them as fast for 64 as
for one."""
_OPTION = "inference.batch_invariant"


def refuse(model: CausalLM, plugin: KVCachePlugin) -> None:
    """What makes a token's results depend on others by itself.

    Raises:
        UserError: the model or the cache does.
    """
    if because := model.whole_sequences_because():
        raise UserError(f"{_OPTION}: what a token gets depends on its company in this model, since {because}; set it to false")
    if not plugin.batch_invariant:
        raise UserError(f"{_OPTION}: the kv_cache that is chosen computes attention by what else a step has; use paged, or set it to false")


@dataclass(frozen=True)
class _Tile:
    """Parts of a step's pieces.

    Attributes:
        owners: numbers of these pieces.
        begin: the first of its tokens among the step's.
    """

    pieces: list[Piece]
    owners: list[int]
    begin: int

    @property
    def tokens(self) -> int:
        return sum(piece.stretch.length for piece in self.pieces)


class InTiles(Runner):
    """Runs a model on one number of rows, again and again."""

    _tokens = 0
    """Of the tile; the other rows fill it up."""

    @property
    def rows(self) -> int:
        """That the model sees at a time."""
        return _ROWS_ON_GPU if is_gpu(self._device) else _ROWS

    def _by_python(self, pieces: Sequence[Piece], tokens_T: Tensor | None) -> list[Tensor]:
        found: list[list[Tensor]] = [[] for _ in pieces]
        with fixed_rows(self.rows, self._device):
            for tile in _tiles(pieces, self.rows):
                self._tokens = tile.tokens
                self._adapters.serve([piece.adapter for piece in tile.pieces for _ in range(piece.stretch.length)])
                its_T = None
                if tokens_T is not None:
                    its_T = tokens_T.new_zeros(self.rows)
                    its_T[: self._tokens] = tokens_T[tile.begin : tile.begin + self._tokens]
                for owner, rows_RV in zip(tile.owners, super()._by_python(tile.pieces, its_T), strict=True):
                    found[owner].append(rows_RV.clone())  # and not all rows of the tile with them
        return [_joined(parts) for parts in found]

    def _filled(self, rows: list[int]) -> list[int]:
        return rows + [0] * (self.rows - len(rows)) if rows else rows

    def _attend(self, block: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, **how: Any) -> Tensor:
        out_TNH = torch.zeros_like(q_TNH)
        out_TNH[: self._tokens] = super()._attend(block, *(x[: self._tokens] for x in (q_TNH, k_TKH, v_TKH)), **how)
        return out_TNH


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of parts that have any."""
    some = [rows_RV for rows_RV in parts if len(rows_RV)] or parts[:1]
    return some[0] if len(some) == 1 else torch.cat(list(some))


def _tiles(pieces: Sequence[Piece], rows: int) -> Iterator[_Tile]:
    """Of as many tokens each, but for the last."""
    tile, begin, room = _Tile([], [], 0), 0, rows
    for owner, piece in enumerate(pieces):
        first, length = 0, piece.stretch.length
        while first < length:
            count = min(room, length - first)
            tile.pieces.append(_part(piece, first, first + count))
            tile.owners.append(owner)
            first, begin, room = first + count, begin + count, room - count
            if not room:
                yield tile
                tile, room = _Tile([], [], begin), rows
    if tile.pieces:
        yield tile


def _part(piece: Piece, first: int, end: int) -> Piece:
    """Tokens from ``first`` on, counted from the stretch's start, up to ``end``."""

    def within(these: range) -> range:
        begin = max(these.start, first)
        return range(begin - first, max(begin, min(these.stop, end)) - first)

    of = piece.stretch
    return replace(
        piece,
        stretch=Stretch(of.sequence, of.start + first, end - first),
        tokens=piece.tokens[first:end],
        wanted=within(piece.wanted),
        hidden=within(piece.hidden),
        scored=within(piece.scored),
    )


def try_out(runner: InTiles, cache: KVCache, context: int, vocab_size: int) -> None:
    """Whether a row's place among the others makes no difference: of a prompt that is computed at once, and again behind others and in
    pieces, so that every row stands elsewhere.

    Args:
        cache: of the runner; nothing stays in it.
        context: tokens that a sequence can have.

    Raises:
        UserError: it does on this machine.
    """
    length = min(2 * runner.rows + 3, context, cache.capacity // 2)
    others, first = min(5, length), min(9, length)
    ids = [(7 + 31 * at) % vocab_size for at in range(length)]
    ways = [[[(-1, 0, length)]], [[(-2, 0, others), (-1, 0, first)], [(-1, first, length)]]]
    found: list[Tensor] = []
    for steps in ways:
        rows: list[Tensor] = []
        try:
            for step in steps:
                some = [each for each in step if each[1] < each[2]]
                if not all(cache.reserve(*each) for each in some):
                    return  # no room for two sequences, so for no company
                pieces = [Piece(Stretch(number, at, end - at), ids[at:end], range(end - at)) for number, at, end in some]
                rows += [rows_RV.clone() for rows_RV, piece in zip(runner.run(pieces), pieces, strict=True) if piece.stretch.sequence == -1]
        finally:
            for number in (-1, -2):
                cache.release(number)
        found.append(torch.cat(rows))
    if not torch.equal(*found):
        raise UserError(f"{_OPTION}: on this machine torch computes a row otherwise at another place among as many; set it to false")
