"""Adapters beside a model that generates: several at once, each for the tokens of its own requests (Chen et al. 2023, Punica,
https://arxiv.org/abs/2310.18547)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from fw.errors import UserError, did_you_mean
from fw.inference.low_rank import Change
from fw.kernels.fixed_rows import rows_of_products
from fw.kinds.model import CausalLM
from fw.kinds.peft import LowRankChange


@dataclass(frozen=True, eq=False)
class Adapter:
    """One that is loaded.

    Attributes:
        number: no other has it, not even one that comes to have the name.
        changes: what it adds to what layers give, of what they see; by their names.
    """

    name: str
    number: int
    changes: Mapping[str, Change]

    @property
    def salt(self) -> bytes:
        """What makes keys and values of its tokens others than those of the same tokens without it."""
        return b"adapter %d" % self.number


class Adapters:
    """Those of a model. One that is dropped serves the requests that have it to their end.

    Args:
        read: gives the changes of a directory.
        told: hears of each one that is loaded, and of its directory.
    """

    def __init__(
        self,
        model: CausalLM,
        device: torch.device,
        read: Callable[[str], Mapping[str, LowRankChange]],
        told: Callable[[Adapter, str], None] = lambda adapter, directory: None,
    ) -> None:
        self._model, self._device, self._read, self._told = model, device, read, told
        self._loaded: dict[str, Adapter] = {}
        self._numbers = count(1)
        self._hooked: set[str] = set()
        self._now: Sequence[tuple[Adapter, Tensor]] = ()
        self._seen_R: Tensor | None = None

    @property
    def names(self) -> list[str]:
        """Of those that requests may ask for."""
        return list(self._loaded)

    @property
    def hooks(self) -> int:
        """Forward hooks on the model; they do nothing to tokens without an adapter."""
        return len(self._hooked)

    def load(self, name: str, directory: str) -> None:
        """From the next request on, ``name`` is what is in the directory.

        Raises:
            UserError: there is none that fits, or the name is taken.
        """
        if name in self._loaded:
            raise UserError(f"an adapter '{name}' is loaded already; drop it first, or give another name")
        made = self.read(name, directory, next(self._numbers))
        self._told(made, directory)
        self._loaded[name] = made

    def read(self, name: str, directory: str, number: int) -> Adapter:
        """One that nobody finds by its name.

        Raises:
            UserError: there is none that fits.
        """
        changes = {layer: Change(change, self._device) for layer, change in self._read(directory).items()}
        for layer in changes.keys() - self._hooked:
            # Before whatever else comes after the layer, as the sum over ranks of which this is a part.
            self._model.get_submodule(layer).register_forward_hook(partial(self._add, layer), prepend=True)
            self._hooked.add(layer)
        return Adapter(name, number, changes)

    def drop(self, name: str) -> None:
        """No request may ask for it any more.

        Raises:
            UserError: there is none of this name.
        """
        self.find(name)
        del self._loaded[name]

    def find(self, name: str) -> Adapter:
        """The one of this name.

        Raises:
            UserError: there is none.
        """
        if name not in self._loaded:
            there = f"loaded are: {', '.join(self._loaded)}" if self._loaded else "none is loaded"
            raise UserError(f"there is no adapter '{name}'{did_you_mean(name, list(self._loaded))} ({there})")
        return self._loaded[name]

    def serve(self, of: Sequence[Adapter | None]) -> None:
        """What is computed next is of tokens with these adapters, one behind another."""
        rows: dict[Adapter, list[int]] = {}
        for row, adapter in enumerate(of):
            if adapter is not None:
                rows.setdefault(adapter, []).append(row)
        self._now = [(adapter, torch.tensor(those, device=self._device)) for adapter, those in rows.items()]

    @contextmanager
    def seeing(self, rows_R: Tensor | None) -> Iterator[None]:
        """What is computed meanwhile is of these of the tokens, ``[R, I]``; None for all."""
        self._seen_R = rows_R
        try:
            yield
        finally:
            self._seen_R = None

    def _add(self, layer: str, _module: nn.Module, args: tuple[Any, ...], out_TO: Tensor) -> None:
        """After a layer: what adapters of its tokens add."""
        for adapter, tokens in self._now:
            if (change := adapter.changes.get(layer)) is not None:
                x_TI, to_TO = args[0].flatten(0, -2), out_TO.view(-1, out_TO.shape[-1])
                rows = tokens if self._seen_R is None else torch.isin(self._seen_R, tokens).nonzero()[:, 0]
                # Of all rows, where products have a number of them: those with the adapter are as many as happen to be there.
                added = change(x_TI[rows]) if rows_of_products() is None else change(x_TI)[rows]
                to_TO.index_add_(0, rows, added)
