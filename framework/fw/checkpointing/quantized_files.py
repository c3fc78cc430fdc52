"""Weights that files hold in fewer bits, read as they are or as what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw import registry
from fw.checkpointing.pages import leave
from fw.checkpointing.tensor_files import Rows, TensorFiles
from fw.errors import UserError
from fw.kinds import plugin_class
from fw.kinds.model import Quantized
from fw.kinds.quantization import NotThere, QuantizationPlugin, StoredWeight, reading_codes
from fw.locate import CONFIG
from fw.place import Place, place


class QuantizedFiles(TensorFiles):
    """Files in which some tensors are quantized. Each of these is there under its own name, as what it stands for; what belongs to it is
    not."""

    def __init__(self, directory: Path | Place, plugin: QuantizationPlugin) -> None:
        super().__init__(directory)
        self._plugin = plugin
        self._stored = plugin.stored(self.where)
        self._inner = dict(self.where)
        # A weight stands where the first of its tensors does.
        called: dict[str, list[str]] = {part: [] for names in self._stored.values() for part in names}
        for weight, names in self._stored.items():
            called[names[0]] = [weight]
        self.where = {name: file for part, file in self._inner.items() for name in called.get(part, [part])}
        self.files = {file: [name for part in parts for name in called.get(part, [part])] for file, parts in self.files.items()}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the weight itself."""
        if name not in self._stored:
            return super().shape(name)
        with reading_codes(name):
            return self._open(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the weight itself."""
        if name not in self._stored:
            return super().dtype(name)
        with reading_codes(name):
            return self._open(name).dtype

    def whole(self, name: str) -> Tensor:
        """All of a tensor, as what it stands for."""
        if name not in self._stored:
            return super().whole(name)
        with reading_codes(name):
            return self._open(name).dense()

    def rows(self, name: str) -> Rows:
        """Of the weight itself, which is made whole for it."""
        return self.whole(name) if name in self._stored else super().rows(name)

    def mapped(self, name: str) -> Tensor | None:
        """None for what is quantized."""
        return None if name in self._stored else super().mapped(name)

    def superfluous(self, name: str) -> bool:
        """A bias of zeros beside codes, which AutoGPTQ once wrote for layers that have none."""
        stem, _, end = name.rpartition(".")
        return end == "bias" and f"{stem}.weight" in self._stored and not bool(self.whole(name).any())

    def kept(self, name: str, weight: Quantized) -> Mapping[str, Tensor] | None:
        """As a model keeps it; None where that is another way."""
        if name not in self._stored:
            return None
        with reading_codes(name):
            return self._open(name).kept(weight)

    def left(self, name: str, read: Tensor | None = None) -> None:
        """All that a weight is made of."""
        if name not in self._stored:
            super().left(name, read)
        elif self.directory.local is not None:
            for part in self._stored[name]:
                leave(self._inner[part].get_tensor(part))

    def _region(self, name: str, region: list[slice]) -> Tensor:
        return self.whole(name)[tuple(region)] if name in self._stored else super()._region(name, region)

    def _open(self, name: str) -> StoredWeight:
        return self._plugin.open(name, _read(self._inner))


def _read(files: Mapping[str, Any]) -> Callable[[str], Tensor]:
    """What gives a tensor of files, by the file that each is in."""

    def read(name: str) -> Tensor:
        if name not in files:
            raise NotThere(name)
        found: Tensor = files[name].get_tensor(name)
        return found

    return read


def weights_of(directory: Path | Place) -> TensorFiles:
    """The weights of a model directory, whatever it holds them as.

    Raises:
        UserError: as :class:`TensorFiles` and :func:`quantization_for` do.
    """
    plugin = quantization_for(directory)
    return TensorFiles(directory) if plugin is None else QuantizedFiles(directory, plugin)


def quantization_for(directory: Path | Place) -> QuantizationPlugin | None:
    """The plugin that reads a model directory's ``quantization_config``; None where there is none.

    Raises:
        UserError: no plugin reads it, or one says why it does not.
    """
    found = place(directory)
    try:
        config = json.loads(found.read(CONFIG)).get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None  # who reads the configuration says what is wrong with it
    if not config:
        return None
    method = str(config.get("quant_method"))
    known = registry.declared("quantization", "hf_methods")
    where = TensorFiles(found).where
    for name in known.get(method, []):
        try:
            plugin = plugin_class(QuantizationPlugin, name).from_hf(config, where)
        except UserError as error:
            raise UserError(f"{found / CONFIG}: quantization_config: {error}") from None
        if plugin is not None:
            plugin.look(_read(where))
            return plugin
    raise UserError(
        f"{found / CONFIG}: quantization_config: no quantization plugin reads these weights: quant_method '{method}'"
        + (" in this variant" if method in known else f" (there are: {', '.join(sorted(known)) or 'none'})")
        + "; take a directory of the plain weights"
    )
