"""A model whose attention goes through a cache of keys and values: the model's own code runs, on tokens of many sequences at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fw.errors import UserError
from fw.inference.adapters import Adapter, Adapters
from fw.inference.divided import Ranks
from fw.inference.steady import SteadySteps, Way
from fw.kernels.linear import PlainLinear, available, layer_of, takes
from fw.kinds.attention import AttentionPlugin, Pattern
from fw.kinds.kv_cache import KVCache, Stretch
from fw.kinds.model import CausalLM, Head, LinearHead
from fw.planned import is_gpu
from fw.registry import NoOptions

SCORED = 32
"""Rows whose logits are there at a time, of those that are scored: with fewer, the head's weight is read more often."""


class ThroughCache(AttentionPlugin):
    """What a model is built with that is to compute through a cache."""

    def __init__(self) -> None:
        super().__init__(NoOptions())

    def plan(self, pattern: Pattern, device: torch.device) -> None:
        """The cache knows who sees whom."""

    def attend(
        self, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, plan: Any, *, scale: float, softcap: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        """Not before a block has its own part of a cache."""
        raise AssertionError("attention of a model that has no cache yet")


class _OfBlock(ThroughCache):
    def __init__(self, attend: Callable[..., Tensor], block: int) -> None:
        super().__init__()
        self._attend, self._block = attend, block

    def attend(
        self, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, plan: Any, *, scale: float, softcap: float | None = None, dropout: float = 0.0
    ) -> Tensor:
        q_TNH, k_TKH, v_TKH = (x_BNLH[0].transpose(0, 1) for x_BNLH in (q_BNLH, k_BKLH, v_BKLH))
        return self._attend(self._block, q_TNH, k_TKH, v_TKH, scale=scale, softcap=softcap).transpose(0, 1)[None]


@dataclass(frozen=True)
class Piece:
    """Tokens of a sequence that a step computes, and those whose logits are wanted.

    Attributes:
        tokens: none where they are on the device alone.
        wanted: positions, from the stretch's start on.
        adapter: that the tokens are computed with.
        hidden: positions likewise, whose hidden states are wanted, and no logits.
        scored: positions likewise, whose logits ``[at most SCORED, V]`` in fp32 are given to ``score``, one row after another, and are gone
            afterwards.
    """

    stretch: Stretch
    tokens: Sequence[int]
    wanted: range
    adapter: Adapter | None = None
    hidden: range = range(0)
    scored: range = range(0)
    score: Callable[[Tensor], object] | None = None


class Logits(list[Tensor]):
    """Of each piece of a step, and of all of them as they lie.

    Args:
        whole_RV: these, one behind another.
    """

    def __init__(self, of_pieces: Iterable[Tensor], whole_RV: Tensor) -> None:
        super().__init__(of_pieces)
        self.whole_RV = whole_RV


class Runner:
    """Runs a model that was built with :class:`ThroughCache`.

    Args:
        replay: what can be recorded is, and made again without Python; nothing of a model whose weights come from elsewhere.
        ranks: that divide the model's layers, and have been joined.

    Raises:
        UserError: the model computes attention by itself.
    """

    def __init__(
        self,
        model: CausalLM,
        cache: KVCache,
        device: torch.device,
        adapters: Adapters,
        replay: bool = True,
        ranks: Ranks | None = None,
    ) -> None:
        self._model, self._cache, self._device, self._adapters = model, cache, device, adapters
        self._tied: tuple[Tensor, PlainLinear | None] | None = None
        self._ranks = ranks or Ranks()
        recorded = (
            replay
            and not model.elsewhere
            and (self._ranks.ranks == 1 if is_gpu(device) else device.type == "cpu" and self._ranks.repeatable)
        )

        def idle_hooks() -> int:
            return adapters.hooks + self._ranks.hooks

        self.steady = SteadySteps(self._logits, cache, model, device, idle_hooks) if recorded else None
        for number, block in enumerate(model.blocks):
            found = [module for module in block.modules() if isinstance(getattr(module, "attention", None), ThroughCache)]
            if len(found) != 1:
                raise UserError(f"block {number} of the model does not leave its attention to a plugin, so no cache can be put behind it")
            setattr(found[0], "attention", _OfBlock(self._attend, number))  # noqa: B010 - any module of a model's

    def _attend(self, block: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, softcap: float | None) -> Tensor:
        return self._cache.attend(block, q_TNH, k_TKH, v_TKH, scale=scale, softcap=softcap)

    def _filled(self, rows: list[int]) -> list[int]:
        """As many as the model is to see."""
        return rows

    def _through(self, head: Head) -> Head:
        """The head's weight may be the embedding's, which nothing has packed: it is used as it lies."""
        if not isinstance(head, LinearHead):
            return head
        if self._tied is None or self._tied[0] is not head.weight_VD:
            layer = layer_of(head.weight_VD)
            self._tied = head.weight_VD, PlainLinear(layer) if takes(layer) and available() else None
        tied = self._tied[1]
        return head if tied is None else lambda x_D: head.capped(tied(x_D))

    def run(self, pieces: Sequence[Piece], tokens_T: Tensor | None = None, way: Way | None = None) -> list[Tensor]:
        """Logits ``[wanted, V]`` of each in fp32, or hidden states ``[hidden, D]`` where these are wanted, which are there until the next
        step. Keys and values of all tokens are in the cache afterwards.

        Args:
            tokens_T: of all pieces, where they are on the device alone; with one rank.
            way: that the first rank goes; None on that one.
        """
        way = self._way(pieces) if way is None else way
        with torch.inference_mode(), self._ranks.step(pieces, way):
            return self._run(pieces, tokens_T, way)

    def _way(self, pieces: Sequence[Piece]) -> Way:
        if self.steady is None or any(piece.adapter is not None for piece in pieces):
            return Way.PYTHON
        return self.steady.way(pieces)

    def _run(self, pieces: Sequence[Piece], tokens_T: Tensor | None, way: Way) -> list[Tensor]:
        self._adapters.serve([piece.adapter for piece in pieces for _ in range(piece.stretch.length)])
        if self.steady is not None and (logits_RV := self.steady.run(way, pieces, tokens_T)) is not None:
            return Logits(logits_RV.split([len(piece.wanted) for piece in pieces]), logits_RV)
        if way is Way.COMPARED:
            self._by_python(pieces, tokens_T)  # what other ranks do by their recordings
        return self._by_python(pieces, tokens_T)

    def _by_python(self, pieces: Sequence[Piece], tokens_T: Tensor | None) -> list[Tensor]:
        at = self._filled([position for piece in pieces for position in range(piece.stretch.start, piece.stretch.end)])
        rows, begin = [], 0
        hidden: list[list[int]] = []
        scored: list[tuple[int, int]] = []
        for number, piece in enumerate(pieces):
            rows += [begin + row for row in piece.wanted]
            scored += [(begin + row, number) for row in piece.scored]
            hidden.append([begin + row for row in piece.hidden])
            begin += piece.stretch.length
        self._cache.begin([piece.stretch for piece in pieces])
        wanted_R = torch.tensor(self._filled(rows), dtype=torch.int64, device=self._device)
        if tokens_T is None:
            tokens_T = torch.tensor(self._filled([token for piece in pieces for token in piece.tokens]), device=self._device)
        ids_1T, positions_1T = tokens_T[None], torch.tensor([at], device=self._device)
        states: dict[int, Tensor] = {}

        def see(x_TD: Tensor, logits_of: Callable[[Tensor], Tensor]) -> None:
            states.update((number, x_TD[rows].float()) for number, rows in enumerate(hidden) if rows)
            count = -(-len(scored) // SCORED)
            for part in range(count):  # about as many rows in each: products of few are computed otherwise
                these = scored[len(scored) * part // count : len(scored) * (part + 1) // count]
                self._score(pieces, these, logits_of)

        logits_RV = self._logits(ids_1T, positions_1T, wanted_R, see if any(hidden) or scored else None)
        found = logits_RV[: len(rows)].split([len(piece.wanted) for piece in pieces])
        return [states.get(number, logits_RV) for number, logits_RV in enumerate(found)]

    def _score(self, pieces: Sequence[Piece], scored: Sequence[tuple[int, int]], logits_of: Callable[[Tensor], Tensor]) -> None:
        """Rows, each of the piece of that number."""
        logits_RV = logits_of(torch.tensor(self._filled([row for row, _ in scored]), device=self._device))
        begin = 0
        for number, its_rows in groupby(number for _, number in scored):
            end = begin + len(list(its_rows))
            if (score := pieces[number].score) is not None:  # other ranks than the first have none
                score(logits_RV[begin:end])
            begin = end

    def _logits(
        self,
        ids_1T: Tensor,
        positions_1T: Tensor,
        wanted_R: Tensor | None,
        see: Callable[[Tensor, Callable[[Tensor], Tensor]], None] | None = None,
    ) -> Tensor:
        """Of the rows that are wanted.

        Args:
            wanted_R: None where all are.
            see: is given hidden states ``[T, D]``, and what makes logits of some of their rows.
        """

        def readout(x_1TD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            def logits_of(rows_R: Tensor | None) -> Tensor:
                with self._adapters.seeing(rows_R):
                    logits_RV = self._through(head)(x_1TD[0] if rows_R is None else x_1TD[0, rows_R]).float()
                return self._ranks.whole_logits(logits_RV, self._model.vocab_size)

            if see is not None:
                see(x_1TD[0], logits_of)
            return logits_of(wanted_R) if wanted_R is None or len(wanted_R) else x_1TD.new_empty(0, 0)

        logits_RV: Tensor = self._model(ids_1T, positions_BL=positions_1T, readout=readout)
        return logits_RV
