"""The contract of ``peft``: which small part of a model trains, the rest being frozen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fw.kinds.model import Adapters, CausalLM
from fw.kinds.sharding import StepSpec
from fw.registry import Plugin

_off = False


@contextmanager
def without_adapters() -> Iterator[None]:
    """Within it, layers compute what their base does."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def adapters_are_off() -> bool:
    """Asked by every layer that an adapter changes; what trains of the base itself is not undone."""
    return _off


@dataclass(frozen=True)
class LowRank:
    """A layer's change ``s · B A x``.

    Attributes:
        down: A's name in the model; ``up`` is B's.
        scale: s.
    """

    down: str
    up: str
    scale: float


@dataclass(frozen=True)
class LowRankChange:
    """``s · B A x`` beside what a layer gives.

    Attributes:
        down_RI: A, of rank R.
        up_OR: B.
        scale: s.
    """

    down_RI: Tensor
    up_OR: Tensor
    scale: float


class PeftPlugin(Plugin):
    """Decides what trains. What does not needs neither gradient nor optimizer state, and a checkpoint does not hold it."""

    kind: ClassVar[str] = "peft"

    peft_types: ClassVar[tuple[str, ...]] = ()
    """``peft_type`` of the ``adapter_config.json`` files this plugin reads; a literal, looked up without importing the plugin."""

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """The plugin configured as an ``adapter_config.json`` says.

        Raises:
            UserError: a field that cannot be honoured, by name.
        """
        raise NotImplementedError(f"{cls.__name__} reads no adapter_config.json")

    def low_rank(self, model: CausalLM) -> Mapping[str, LowRank] | None:
        """Of a model that this was applied to: the changes of linear layers, by the layers' names; None where not all that was added
        are such. A layer of these may have ``apart()``, which gives the layer that it was, on the same tensors, and its
        :class:`LowRankChange`, or None where it does more: what generates computes the two by kernels."""
        return None

    def check(self, model: CausalLM, spec: StepSpec) -> None:
        """Refuse what cannot work, before any rank starts. ``model`` is on the meta device, with its adapters.

        Raises:
            UserError: with what would work.
        """

    @abstractmethod
    def apply(self, model: CausalLM) -> Adapters | None:
        """Freeze the model but for what trains, and add the parameters that do. Called under ``torch.device("meta")``, on every rank alike,
        before layers are divided or wrapped.

        What was there keeps its names, and its modules stay the same objects. None where all of the model trains.

        Raises:
            UserError: the options do not fit the model; what would.
        """
