"""The contract of ``activation``: what forward does not keep for backward, which computes it again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar

from fw.kinds.model import CausalLM
from fw.kinds.sharding import StepSpec
from fw.registry import Plugin

_repeats: ContextVar[bool] = ContextVar("fw.repeats", default=False)


def repeats() -> bool:
    """Whether blocks are being called again in backward. What looks at what forward saves leaves such a call alone."""
    return _repeats.get()


@contextmanager
def repeating() -> Iterator[None]:
    """Within it, blocks are called again."""
    before = _repeats.set(True)
    try:
        yield
    finally:
        _repeats.reset(before)


class ActivationPlugin(Plugin):
    """Decides what is recomputed. The result of a step is the same; memory and time are not."""

    kind: ClassVar[str] = "activation"

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """Refuse what the model does not allow, before any rank starts. ``model`` is on the meta device.

        Raises:
            UserError: with what would work.
        """

    @abstractmethod
    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """Change what the model's modules do when called; their names and parameters stay. On the meta device, on every rank alike,
        before blocks are compiled and divided."""

    def change_precision(self) -> None:
        """Called between two steps: from here on blocks compute in another dtype, so that bytes are others. On every rank."""
