"""A model's linear layers changed one block after another, each by what it sees of some text once those before it are changed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from fw.bars import Bar
from fw.checkpointing.stream import Sized, size_bytes
from fw.checkpointing.tensor_files import TensorFiles
from fw.kinds.checkpoint import parts
from fw.kinds.data import IGNORED
from fw.kinds.model import CausalLM, Head, Readout
from fw.pretrained.block_by_block import BlockByBlock
from fw.pretrained.calibration import CalibrationText
from fw.pretrained.load import write_weights

ROWS = 4
"""That pass a block at once."""
_BESIDE = 96 << 20
"""Bytes that kernels and the heap take beside tensors, at most; 72 MiB were seen, 32 with torch's kernels alone."""


class Change(ABC):
    """What becomes of weights."""

    doing: ClassVar[str]
    """A word for who waits."""

    def prepare(self, number: int, block: nn.Module, prefix: str, found: Mapping[str, Tensor]) -> None:  # noqa: B027 - most need none
        """A block's weights are about to be changed.

        Args:
            prefix: of its parameters' names in the model.
            found: Σ x xᵀ of what its layers see, by their weights' names; empty where there is no text to be fitted to.
        """

    @property
    @abstractmethod
    def names(self) -> Collection[str]:
        """Weights of linear layers that are changed, by the model's names."""

    @abstractmethod
    def __call__(self, name: str, weight_OI: Tensor, gram_II: Tensor | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        """What the layer computes with from now on, and the tensors that files hold for it, by their names.

        Args:
            gram_II: Σ x xᵀ of what the layer sees, fp32; None where there is no text to be fitted to.
        """


class BlockPass:
    """Hidden states of the text's rows, from block to block; what is done is in files of the spool directory."""

    def __init__(self, runner: BlockByBlock, change: Change, text: CalibrationText, spool: Path) -> None:
        self._runner, self._change, self._text, self._spool = runner, change, text, spool

    def run(self) -> tuple[float, float]:
        """Perplexity of what was held out, before and after."""
        # As many rows every time, so that what the model computes once for them fits all.
        fitted = embedded(self._runner, self._text.ids_NL)
        before = embedded(self._runner, self._text.held_out_ids_ML)
        after = list(before)
        blocks = range(len(self._runner.model.blocks))
        for number in Bar(blocks, desc=self._change.doing, unit=" blocks"):
            with self._runner.block(number) as block:
                through(self._runner, number, before)
                self._block(number, block, grams(self._runner, number, self._names(block), fitted) if fitted else {})
                through(self._runner, number, fitted)
                through(self._runner, number, after)
                self._keep(f"block-{number}", self._within(block))
        self._stored: dict[str, Mapping[str, Tensor]] = {}
        outside = self._runner.outside()
        for name in outside.keys() & set(self._change.names):
            _, self._stored[name] = self._change(name, outside[name], None)
        self._keep("outside", outside)
        return perplexity(self._runner, self._text, before), perplexity(self._runner, self._text, after)

    def write(self, directory: Path, max_bytes: int) -> int:
        """The directory's weights; returns how many bytes."""
        stems = ["outside", *(f"block-{number}" for number in range(len(self._runner.model.blocks)))]
        return write_spooled([TensorFiles(self._spool, stem) for stem in stems], directory, max_bytes)

    def _names(self, block: nn.Module) -> list[str]:
        return [name for name in self._change.names if self._runner.owns(block, name)]

    def _within(self, block: nn.Module) -> dict[str, Tensor]:
        return {name: t.detach() for name, t in self._runner.model.stored().items() if self._runner.owns(block, name)}

    def _block(self, number: int, block: nn.Module, found: Mapping[str, Tensor]) -> None:
        self._stored = {}
        self._change.prepare(number, block, self._runner.name(block), found)
        for name in self._names(block):
            linear = self._runner.model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, nn.Linear)
            dense, self._stored[name] = self._change(name, linear.weight.detach(), found.get(name))
            linear.weight.data = dense

    def _keep(self, stem: str, tensors: Mapping[str, Tensor]) -> None:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found |= self._stored[name] if name in self._stored else in_files(self._runner.model, name, tensor)
        save_file(found, self._spool / f"{stem}.safetensors", metadata={"format": "pt"})


def in_files(model: CausalLM, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """What files hold of a tensor of a model."""
    return {of: part.whole(tensor).cpu().contiguous() for of, part in parts(model, {name: tensor}).items()}


def write_spooled(sources: Sequence[TensorFiles], directory: Path, max_bytes: int) -> int:
    """All tensors of some files as one directory's weights, in that order; returns how many bytes."""
    where = {name: files for files in sources for name in files.where}
    tensors: dict[str, Sized] = {name: Announced(files.shape(name), files.dtype(name)) for name, files in where.items()}
    write_weights(directory, tensors, lambda name: where[name].whole(name), max_bytes)
    return sum(map(size_bytes, tensors.values()))


class Announced:
    """A tensor that is to come."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


def embedded(runner: BlockByBlock, ids_NL: Tensor) -> list[Tensor]:
    """Hidden states before the first block, some rows at a time."""
    return [runner.embedded(ids_BL) for ids_BL in ids_NL.split(ROWS)] if len(ids_NL) else []


def through(runner: BlockByBlock, number: int, states: list[Tensor]) -> None:
    """Take hidden states behind a block, in place."""
    for at, x_BLD in enumerate(states):
        states[at] = runner.through(number, x_BLD)


def grams(runner: BlockByBlock, number: int, names: Sequence[str], states: Sequence[Tensor]) -> dict[str, Tensor]:
    """Σ x xᵀ of what the layers of these weights see in a block, fp32; one for layers that are given the same."""
    found: dict[str, Tensor] = {}
    with _inputs(runner.model, names, found):
        for x_BLD in states:
            runner.through(number, x_BLD)
    return found


@contextmanager
def _inputs(model: nn.Module, names: Sequence[str], found: dict[str, Tensor]) -> Iterator[None]:
    leaders: dict[str, str] = {}
    seen: list[tuple[Tensor, str]] = []

    def hook(name: str) -> Any:
        def add(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if name not in leaders:
                leaders[name] = next((leader for x, leader in seen if x is args[0]), name)
                seen.append((args[0], name))
            if leaders[name] == name:
                x_TI = args[0].detach().flatten(0, -2).float()
                found[name] = found[name].addmm_(x_TI.t(), x_TI) if name in found else x_TI.t() @ x_TI

        return add

    handles = [model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(hook(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        seen.clear()
    for name, leader in leaders.items():
        found[name] = found[leader]


def perplexity(runner: BlockByBlock, text: CalibrationText, states: Sequence[Tensor]) -> float:
    """Of what was held out, by hidden states behind the last block."""
    total, count = 0.0, 0
    pairs = zip(text.held_out_ids_ML.split(ROWS), text.held_out_labels_ML.split(ROWS), states, strict=True)
    for ids_BL, labels_BL, x_BLD in pairs:
        total += float(runner.read_out(ids_BL, x_BLD, _summed(labels_BL.to(x_BLD.device))))
        count += int((labels_BL != IGNORED).sum())
    return math.exp(total / count)


def _summed(labels_BL: Tensor) -> Readout:
    def loss(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
        return F.cross_entropy(head(x_BLD).flatten(0, 1).float(), labels_BL.flatten(), ignore_index=IGNORED, reduction="sum")

    return loss


def estimate(model: CausalLM, changed: Collection[tuple[int, int]], text: CalibrationText, dtype: torch.dtype) -> int:
    """Bytes at most: what is outside of blocks, the largest block, changing its largest layer, hidden states, logits of some rows.

    Args:
        changed: features out and in of the layers, if there are any.
    """
    inside = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    width = max(p.numel() for block in model.blocks for p in block.parameters() if p.dim() == 1)  # a norm has that of the hidden states
    outside = sum(p.numel() for p in model.parameters()) - sum(inside)
    fitted, length = len(text.ids_NL), text.held_out_ids_ML.shape[1]
    widest = max((max(shape) for shape in changed), default=0)
    largest = sorted((into * into for _, into in changed), reverse=True)[: -(-len(changed) // max(1, len(inside)))]
    layer = max((5 * out * into + (4 * into * into if fitted else 0) for out, into in changed), default=0)
    states = (fitted + 2 * len(text.held_out_ids_ML)) * length * width
    passing = ROWS * length * (8 * width + 4 * widest)
    logits = ROWS * length * model.vocab_size * (dtype.itemsize + 2 * 4)
    kept = (outside + 2 * max(inside) + states + passing) * dtype.itemsize
    return kept + 4 * (sum(largest) if fitted else 0) + max(4 * layer, logits) + _BESIDE
