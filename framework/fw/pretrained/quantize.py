"""A model directory in fewer bits: block by block, by rounding or by what each layer sees of some text."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from fw import registry
from fw.checkpointing.quantized_files import weights_of
from fw.checkpointing.stream import Sized, size_bytes
from fw.checkpointing.tensor_files import TensorFiles, weights_for
from fw.config import format_size, parse_size
from fw.errors import UserError
from fw.kinds import KINDS
from fw.kinds.attention import AttentionPlugin
from fw.kinds.checkpoint import parts
from fw.kinds.data import IGNORED, Say
from fw.kinds.model import CausalLM, Head, ModelPlugin
from fw.kinds.quantization import QuantizationPlugin
from fw.locate import CONFIG, find
from fw.meter.memory import OwnPeak
from fw.place import place
from fw.pretrained.block_by_block import BlockByBlock
from fw.pretrained.calibration import CalibrationText, calibration_text
from fw.pretrained.directory import read_config
from fw.pretrained.export import DTYPE_NAMES, copy_beside
from fw.pretrained.load import file_name, new_directory, write_json, write_weights

_AT_A_TIME = 4
"""Rows that pass a block at once."""
_GROUP_SIZE, _WHOLE_ROWS = "group_size", -1
_BESIDE = 64 << 20
"""Bytes that kernels and the heap take beside tensors, at most."""


@dataclass(frozen=True)
class Options:
    """How a model is quantized.

    Attributes:
        method: ``rtn``, or one that the plugin knows besides.
        plugin: a quantization plugin, by name, and its options.
        text: files or globs, or ``python-docs``.
        rows, held_out, length: of the text, to be fitted to and to be judged by.
        memory: bytes that it may take by its own estimate; None for any.
        dtype: of what is not quantized, by name; that of the files where None.
    """

    method: str
    plugin: str
    settings: Mapping[str, Any]
    text: Sequence[str]
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
        layers: that are quantized.
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


def quantize(source: str | Path, to: str | Path, options: Options, tell: Say, device: torch.device | None = None) -> Report:
    """Write the model directory ``to``.

    One block is in memory at a time, beside embedding and head and the hidden states of the rows.

    Raises:
        UserError: no such model, options that do not fit it, or more memory is needed than ``options.memory``.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    directory = find(source)
    config = read_config(directory)
    files = weights_of(directory)
    dtype = _dtype(options, files)
    model_cls = registry.load("model", "auto", ModelPlugin, KINDS["model"].apis)
    built = model_cls(model_cls.Config(path=str(directory)))
    assert isinstance(built, ModelPlugin) and built.vocab_size is not None
    length = _length(options, config)
    with torch.device("meta"):
        attention_cls = registry.load("attention", "sdpa", AttentionPlugin, KINDS["attention"].apis)
        attention = attention_cls(attention_cls.Config())
        assert isinstance(attention, AttentionPlugin)
        model = built.build(built.vocab_size, length, attention).to(dtype)
        for settings in _choices(options):
            plugin, coded = _plugin(options, settings), built.build(built.vocab_size, length, attention)
            try:
                coded.quantized, coded.quantization = plugin.apply(coded, dtype), plugin
                break
            except UserError:
                if settings.get(_GROUP_SIZE) in (options.settings.get(_GROUP_SIZE), _WHOLE_ROWS):
                    raise
    for name in coded.quantized:
        file_name(coded, name)  # or it is refused, before anything is done
    text = calibration_text(options.text, Path(str(directory)), options.rows, options.held_out, length, tell)
    if options.method == "rtn":
        text = replace(text, ids_NL=text.ids_NL[:0])
    estimated = _estimate(model, coded, text, dtype)
    if options.memory is not None and estimated > options.memory:
        raise UserError(
            f"--memory: {format_size(options.memory)} is less than the {format_size(estimated)} that this takes; fewer --samples or a "
            f"smaller --length take less, and --method rtn keeps nothing of them"
        )
    size = settings[_GROUP_SIZE]
    groups = "a scale for each row" if size == _WHOLE_ROWS else f"a scale for {size} neighbours"
    tell(f"{len(coded.quantized)} layers of {len(model.blocks)} blocks, {groups}; memory: at most {format_size(estimated)}, by estimate")
    filling = weights_for(files, model)
    with OwnPeak(device) as peak, new_directory(Path(to)) as made:
        spool = made / "spool"
        spool.mkdir()
        work = _Work(BlockByBlock(model, filling, device), coded, options.method, text, spool)
        perplexities = work.run()
        total = _write(work, made, parse_size(options.max_shard_size))
        shutil.rmtree(spool)
        copy_beside(place(directory), made)
        plain = {key: value for key, value in config.items() if key not in ("torch_dtype", "quantization_config")}
        written = {"dtype": str(dtype).removeprefix("torch."), "quantization_config": dict(plugin.hf_config(coded))}
        write_json(made / CONFIG, {**plain, **written})
    return Report(
        str(to),
        options.method,
        len(coded.quantized),
        int((text.held_out_labels_ML != IGNORED).sum()),
        *perplexities,
        sum(math.prod(files.shape(name)) * files.dtype(name).itemsize for name in files.where),
        total,
        estimated,
        peak.bytes,
    )


def _dtype(options: Options, files: TensorFiles) -> torch.dtype:
    if options.dtype is None:
        return next(found for found in map(files.dtype, files.where) if found.is_floating_point)
    if options.dtype not in DTYPE_NAMES:
        raise UserError(f"--dtype {options.dtype} is unknown (there are: {', '.join(DTYPE_NAMES)})")
    return DTYPE_NAMES[options.dtype]


def _choices(options: Options) -> list[dict[str, Any]]:
    """The plugin's options as given; where nobody says how large groups are, the usual size, and smaller ones where it does not divide."""
    if _GROUP_SIZE in options.settings:
        return [dict(options.settings)]
    return [{**options.settings, _GROUP_SIZE: size} for size in (128, 64, 32, _WHOLE_ROWS)]


def _plugin(options: Options, settings: Mapping[str, Any]) -> QuantizationPlugin:
    cls = registry.load("quantization", options.plugin, QuantizationPlugin, KINDS["quantization"].apis)
    plugin = cls(cls.Config(**settings))
    assert isinstance(plugin, QuantizationPlugin)
    if options.method not in plugin.methods:
        raise UserError(f"--method {options.method}: {options.plugin} knows {', '.join(plugin.methods)}")
    return plugin


def _length(options: Options, config: Mapping[str, Any]) -> int:
    longest = int(config.get("max_position_embeddings") or config.get("n_positions") or options.length or 512)
    if options.length is not None and options.length > longest:
        raise UserError(f"--length: {options.length} is more than the {longest} positions of this model")
    return options.length or min(512, longest)


def _estimate(model: CausalLM, coded: CausalLM, text: CalibrationText, dtype: torch.dtype) -> int:
    """Bytes at most: what is outside of blocks, the largest block, quantizing its largest layer, hidden states, logits of some rows."""
    inside = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    outside = sum(p.numel() for p in model.parameters()) - sum(inside)
    length = text.held_out_ids_ML.shape[1]
    linears = [weight.shape for weight in coded.quantized.values()]
    per_block = -(-len(linears) // max(1, len(model.blocks)))
    widest = max(max(shape) for shape in linears)
    hidden = min(min(shape) for shape in linears)
    gram = sum(sorted((into * into for _, into in linears), reverse=True)[:per_block]) if len(text.ids_NL) else 0
    layer = max(5 * 4 * out * into + (4 * 4 * into * into if len(text.ids_NL) else 0) for out, into in linears)
    states = (len(text.ids_NL) + 2 * len(text.held_out_ids_ML)) * length * max(hidden, _width(model))
    passing = _AT_A_TIME * length * (8 * _width(model) + 4 * widest)
    logits = _AT_A_TIME * length * model.vocab_size * (dtype.itemsize + 2 * 4)
    return (outside + 2 * max(inside) + states + passing) * dtype.itemsize + 4 * gram + max(layer, logits) + _BESIDE


def _width(model: CausalLM) -> int:
    """Of the hidden states: what a norm has."""
    return max(p.numel() for block in model.blocks for p in block.parameters() if p.dim() == 1)


class _Work:
    """Hidden states of the rows, from block to block; what is done is in files of the spool directory."""

    def __init__(self, runner: BlockByBlock, coded: CausalLM, method: str, text: CalibrationText, spool: Path) -> None:
        self.runner, self.coded, self._method, self._text, self._spool = runner, coded, method, text, spool
        self._held_out = text.held_out_ids_ML.split(_AT_A_TIME)

    def run(self) -> tuple[float, float]:
        """Perplexity before and after."""
        self._embedded()
        for number in tqdm(range(len(self.runner.model.blocks)), "quantizing", unit="block", leave=False, disable=None):
            with self.runner.block(number) as block:
                self._block(number, block)
        self._keep("outside", self.runner.outside())
        return self._perplexity(self._before), self._perplexity(self._after)

    def files(self) -> Iterator[TensorFiles]:
        """What is done, in the order of the model."""
        yield TensorFiles(self._spool, "outside")
        for number in range(len(self.runner.model.blocks)):
            yield TensorFiles(self._spool, f"block-{number}")

    def _embedded(self) -> None:
        # Rows are of one number at a time, so that what the model computes once for them fits all.
        self._fitted = [self.runner.embedded(ids) for ids in self._text.ids_NL.split(_AT_A_TIME)]
        self._before = [self.runner.embedded(ids) for ids in self._held_out]
        self._after = list(self._before)

    def _block(self, number: int, block: nn.Module) -> None:
        self._before = self._through(number, self._before)
        names = [name for name in self.coded.quantized if self.runner.owns(block, name)]
        grams = self._grams(number, names) if self._fitted else {}
        values: dict[str, Tensor] = {}
        for name in names:
            linear = self.runner.model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(linear, nn.Linear)
            values |= self._codes(name, linear.weight.detach(), grams.get(name))
            linear.weight.data = self._dense(name, values, linear.weight.dtype)
        self._fitted = self._through(number, self._fitted)
        self._after = self._through(number, self._after)
        own = {name: t.detach() for name, t in self.runner.model.stored().items() if self.runner.owns(block, name)}
        self._keep(f"block-{number}", own, values)

    def _through(self, number: int, states: list[Tensor]) -> list[Tensor]:
        for at, x_BLD in enumerate(states):
            states[at] = self.runner.through(number, x_BLD)
        return states

    def _grams(self, number: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Σ x xᵀ of each layer's inputs, fp32; one for layers that are given the same."""
        found: dict[str, Tensor] = {}
        with _inputs(self.runner.model, names, found):
            for x_BLD in self._fitted:
                self.runner.through(number, x_BLD)
        return found

    def _codes(self, name: str, weight_OI: Tensor, gram_II: Tensor | None) -> Mapping[str, Tensor]:
        weight, plugin = self.coded.quantized[name], self.coded.quantization
        assert plugin is not None
        if gram_II is None or self._method == "rtn":
            return weight.quantize(weight_OI)
        return plugin.calibrate(weight, weight_OI, gram_II, self._method)

    def _dense(self, name: str, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        module: Any = self.coded.get_submodule(name.removesuffix(".weight"))
        for part in self.coded.quantized[name].kept:
            module.register_parameter(part.rpartition(".")[2], nn.Parameter(values[part], requires_grad=False))
        dense: Tensor = module.dense_weight(dtype)
        module.to("meta")
        return dense

    def _keep(self, stem: str, tensors: Mapping[str, Tensor], values: Mapping[str, Tensor] | None = None) -> None:
        """As the model's files are to hold them."""
        plugin, values = self.coded.quantization, dict(values or {})
        assert plugin is not None
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if (weight := self.coded.quantized.get(name)) is None:
                found |= {of: part.whole(tensor).cpu().contiguous() for of, part in parts(self.coded, {name: tensor}).items()}
                continue
            if name not in values:  # outside of blocks, where nothing is seen
                values |= weight.quantize(tensor)
            found |= plugin.written(file_name(self.coded, name), weight, {part: values[part] for part in weight.kept})
        save_file(found, self._spool / f"{stem}.safetensors", metadata={"format": "pt"})

    def _perplexity(self, states: list[Tensor]) -> float:
        total, count = 0.0, 0
        labels = self._text.held_out_labels_ML.split(_AT_A_TIME)
        for ids_BL, labels_BL, x_BLD in zip(self._held_out, labels, states, strict=True):
            total += float(self.runner.read_out(ids_BL, x_BLD, _summed(labels_BL.to(x_BLD.device))))
            count += int((labels_BL != IGNORED).sum())
        return math.exp(total / count)


def _summed(labels_BL: Tensor) -> Any:
    def loss(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
        return F.cross_entropy(head(x_BLD).flatten(0, 1).float(), labels_BL.flatten(), ignore_index=IGNORED, reduction="sum")

    return loss


@contextmanager
def _inputs(model: nn.Module, names: Sequence[str], found: dict[str, Tensor]) -> Iterator[None]:
    """Within it, sums of x xᵀ of what the layers of these weights are given; layers that are given one tensor share theirs."""
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


def _write(work: _Work, made: Path, max_bytes: int) -> int:
    """The directory's weights; returns how many bytes."""
    sources = {name: files for files in work.files() for name in files.where}
    tensors: dict[str, Sized] = {name: _Announced(files.shape(name), files.dtype(name)) for name, files in sources.items()}
    write_weights(made, tensors, lambda name: sources[name].whole(name), max_bytes)
    return sum(map(size_bytes, tensors.values()))


@dataclass(frozen=True)
class _Announced:
    shape: tuple[int, ...]
    dtype: torch.dtype
