"""The contract of ``kv_cache``: how keys and values of the sequences that are being generated are kept, and attended to.

Shape suffixes: T tokens of a step, of all its sequences one behind another; N query heads, K key and value heads, H head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fw.kinds.model import KVShape
from fw.registry import Plugin


@dataclass(frozen=True)
class Stretch:
    """Tokens of one sequence that a step computes: ``length`` of them, from position ``start`` on."""

    sequence: int
    start: int
    length: int

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + self.length


@dataclass(frozen=True)
class KVNeeds:
    """What a cache is made for.

    Attributes:
        shapes: of each block of the model.
        dtype: that the model computes keys and values in.
        budget_bytes: that it may take.
        longest: tokens of the longest sequence there will be.
        step_tokens: most that a step computes of one sequence.
        batch_invariant: what attention gives a token is to be the same to the last bit whatever else the step has, of its sequence and of
            others.
    """

    shapes: Sequence[KVShape]
    dtype: torch.dtype
    device: torch.device
    budget_bytes: int
    longest: int
    step_tokens: int
    batch_invariant: bool = False


@dataclass(frozen=True)
class Places:
    """Where everything is in a step, in tensors that stay: of steps with as many sequences, and as many tokens of each.

    Attributes:
        tensors: whatever :meth:`KVCache.attend` reads of the step, and keys and values themselves.
    """

    tensors: Sequence[Tensor]


class KVCache(ABC):
    """Keys and values of many sequences, each known by a number. One thread uses it.

    A step goes: :meth:`reserve` for each of its sequences, :meth:`begin`, then :meth:`attend` once per block.
    """

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Tokens that one sequence can have, alone in the cache."""

    @property
    @abstractmethod
    def live_bytes(self) -> int:
        """What sequences, and what is kept for the next ones, take now."""

    @property
    def used_bytes(self) -> int:
        """What sequences take now; what is only kept for the next ones is free for whoever needs it."""
        return self.live_bytes

    @abstractmethod
    def reserve(self, sequence: int, start: int, end: int) -> bool:
        """Make room for what a step will write at positions ``start`` … ``end - 1``; a sequence that is not known begins with it.

        Returns:
            False, and nothing has changed, where there is no room.
        """

    @abstractmethod
    def release(self, sequence: int) -> None:
        """Forget a sequence, at once. One that is not known is none."""

    @abstractmethod
    def fork(self, source: int, target: int, length: int) -> bool:
        """Begin ``target`` with the first ``length`` tokens of ``source``, all of which are written.

        Returns:
            False, and nothing has changed, where there is no room.
        """

    def reuse(self, sequence: int, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Begin ``sequence`` with as many of the first tokens as are known from other sequences of the same salt; their number, less than
        all."""
        return 0

    def written(self, sequence: int, tokens: Sequence[int], count: int, salt: bytes = b"") -> None:
        """The first ``count`` of ``tokens`` are in the cache now, for :meth:`reuse` by others."""
        return

    def places(self, lengths: Sequence[int]) -> Places | None:
        """For steps of sequences with so many tokens each, that differ in nothing but what is in these tensors; None where they differ in
        more."""
        return None

    @abstractmethod
    def begin(self, stretches: Sequence[Stretch], places: Places | None = None) -> None:
        """What follows is a step of these, whose tokens lie one behind another in this order.

        Args:
            places: of :meth:`places`, that are filled.
        """

    @abstractmethod
    def attend(self, block: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, softcap: float | None = None) -> Tensor:
        """Write the step's keys and values, then ``softmax(c · tanh(scale · q kᵀ / c)) v`` of each token over those of its own sequence up
        to itself, and within the window of the block. Without c, ``softmax(scale · q kᵀ) v``.

        Returns:
            ``[T, N, H]`` in q's dtype.
        """


class KVCachePlugin(Plugin):
    """Makes a cache for a model."""

    kind: ClassVar[str] = "kv_cache"

    lossless: ClassVar[bool] = True
    """Whether results are those of no cache at all."""

    batch_invariant: ClassVar[bool] = False
    """Whether its caches do what :attr:`KVNeeds.batch_invariant` asks for."""

    @abstractmethod
    def token_bytes(self, shapes: Sequence[KVShape], dtype: torch.dtype) -> float:
        """What a token that is kept takes over all blocks of the model."""

    def kept_tokens(self, tokens: int, step_tokens: int) -> int:
        """How many tokens are kept at most of a sequence of so many, of which a step computes no more than ``step_tokens``."""
        return tokens

    @abstractmethod
    def make(self, needs: KVNeeds) -> KVCache:
        """An empty one.

        Raises:
            UserError: nothing fits the budget.
        """
