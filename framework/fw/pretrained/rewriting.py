"""What every way to make a smaller model directory of another needs: the model, its dtype, the text it is looked at with, and a report."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.tensor_files import TensorFiles, weights_for
from fw.config import parse_size
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.attention import AttentionPlugin
from fw.kinds.data import IGNORED, Say
from fw.kinds.model import CausalLM, ModelPlugin
from fw.locate import CONFIG, find
from fw.meter.memory import OwnPeak
from fw.place import place
from fw.pretrained.block_by_block import BlockByBlock
from fw.pretrained.block_pass import BlockPass, Change
from fw.pretrained.calibration import PYTHON_DOCS, CalibrationText, calibration_text
from fw.pretrained.directory import read_config
from fw.pretrained.export import DTYPE_NAMES, copy_beside
from fw.pretrained.load import write_json
from fw.pretrained.new_directory import new_directory

_WRITTEN = ("torch_dtype", "quantization_config")
"""What config.json says of the weights themselves."""


@dataclass(frozen=True)
class Look:
    """What a model is looked at with.

    Attributes:
        text: files or globs, or ``python-docs``.
        rows, held_out, length: of the text, to be fitted to and to be judged by; tokens of a row, 512 or the model's context where None.
        memory: bytes that it may take by its own estimate; None for any.
        dtype: of the weights that are written, and of what is computed, by name; that of the files where None.
    """

    text: Sequence[str] = (PYTHON_DOCS,)
    rows: int = 128
    held_out: int = 64
    length: int | None = None
    memory: int | None = None
    dtype: str | None = None
    max_shard_size: str = "5GiB"


@dataclass(frozen=True)
class Report:
    """What came of it.

    Attributes:
        perplexity_before, perplexity_after: on ``tokens`` of text that nothing was fitted to.
        bytes_before, bytes_after: of the weights in files.
        estimated_bytes, peak_bytes: of memory; the second measured, without what the process had before.
    """

    directory: str
    method: str
    layers: int
    tokens: int
    perplexity_before: float
    perplexity_after: float
    bytes_before: int
    bytes_after: int
    estimated_bytes: int
    peak_bytes: int


class Source:
    """A model directory that another is made of.

    Raises:
        UserError: no such model, or a length or dtype that it has not.
    """

    def __init__(self, path: str | Path, look: Look) -> None:
        self.directory = find(path)
        self.config: dict[str, Any] = read_config(self.directory)
        self.files = weights_of(self.directory)
        self.dtype = _dtype(look, self.files)
        self.length = _length(look, self.config)
        self.look = look
        self.attention = make(AttentionPlugin, "sdpa")
        self._plugin = model_plugin(self.directory)

    def build(self) -> CausalLM:
        """On the meta device, in the dtype of its parts' initial values."""
        assert self._plugin.vocab_size is not None
        with torch.device("meta"):
            return self._plugin.build(self._plugin.vocab_size, self.length, self.attention)

    def runner(self, model: CausalLM, device: torch.device) -> BlockByBlock:
        """Of a model that :meth:`build` has built, in the dtype it computes in."""
        return BlockByBlock(model, weights_for(self.files, model), device)

    def text(self, tell: Say) -> CalibrationText:
        """That it is looked at with."""
        look = self.look
        return calibration_text(look.text, Path(str(self.directory)), look.rows, look.held_out, self.length, tell)

    def finish(self, made: Path, config: Mapping[str, Any]) -> None:
        """Write what belongs to a model directory beside its weights."""
        copy_beside(place(self.directory), made)
        write_json(made / CONFIG, {**config, "dtype": str(self.dtype).removeprefix("torch.")})

    @property
    def nbytes(self) -> int:
        """Of its weights."""
        return sum(math.prod(self.files.shape(name)) * self.files.dtype(name).itemsize for name in self.files.where)


def rewrite(
    source: Source,
    model: CausalLM,
    change: Change,
    text: CalibrationText,
    to: str | Path,
    method: str,
    needed: int,
    config: Mapping[str, Any] | None = None,
) -> Report:
    """Write the model directory ``to``, of the same shape, whose linear layers are changed block by block.

    Args:
        model: as :meth:`Source.build` gives it, in the dtype of the source.
        needed: bytes, by estimate.
        config: what ``config.json`` says besides.
    """
    device = device_here()
    with OwnPeak(device) as peak, new_directory(Path(to)) as made:
        spool = made / "spool"
        spool.mkdir()
        work = BlockPass(source.runner(model, device), change, text, spool)
        before, after = work.run()
        total = work.write(made, parse_size(source.look.max_shard_size))
        shutil.rmtree(spool)
        source.finish(made, {key: value for key, value in source.config.items() if key not in _WRITTEN} | dict(config or {}))
    figures = {"perplexity_before": before, "perplexity_after": after, "bytes_after": total}
    return report(source, to, method, len(change.names), text, **figures, estimated_bytes=needed, peak_bytes=peak.bytes)


def model_plugin(directory: Any) -> ModelPlugin:
    """That reads a model directory."""
    return make(ModelPlugin, "auto", path=str(directory))


def device_here() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def report(source: Source, to: str | Path, method: str, layers: int, text: CalibrationText, **figures: Any) -> Report:
    """With what is known of the source and the text."""
    tokens = int((text.held_out_labels_ML != IGNORED).sum())
    return Report(str(to), method, layers, tokens, bytes_before=source.nbytes, **figures)


def check_memory(look: Look, needed: int, shown: Callable[[int], str]) -> None:
    """Refuse to begin.

    Raises:
        UserError: more is needed than may be taken.
    """
    if look.memory is not None and needed > look.memory:
        raise UserError(
            f"--memory: {shown(look.memory)} is less than the {shown(needed)} that this takes; fewer --samples or a smaller --length"
            " take less"
        )


def _dtype(look: Look, files: TensorFiles) -> torch.dtype:
    if look.dtype is None:
        return next(found for found in map(files.dtype, files.where) if found.is_floating_point)
    if look.dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype {look.dtype} is unknown (there are: {', '.join(DTYPE_NAMES)})")
    return DTYPE_NAMES[look.dtype]


def _length(look: Look, config: Mapping[str, Any]) -> int:
    longest = int(config.get("max_position_embeddings") or config.get("n_positions") or look.length or 512)
    if look.length is not None and look.length > longest:
        raise UserError(f"--length: {look.length} is more than the {longest} positions of this model")
    return look.length or min(512, longest)
