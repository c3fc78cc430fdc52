"""A smaller model of a larger one: blocks, heads and features of the feed-forward network that add least are left out.

What one of them adds is measured on text. A block: 1 - cos of the hidden states before and behind it, its influence (Men et al. 2024,
https://arxiv.org/abs/2403.03853). Heads that share keys and values, and features: the squared norm of what they add to the hidden states,
tr(W G Wᵀ) of their columns of the layer W that sees them, G = Σ x xᵀ.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from fw.bars import Bar
from fw.checkpointing.tensor_files import TensorFiles, weights_for
from fw.config import format_size, parse_size
from fw.errors import UserError
from fw.kinds.data import Say
from fw.kinds.model import CausalLM, Width
from fw.meter.memory import OwnPeak
from fw.pretrained.block_by_block import BlockByBlock
from fw.pretrained.block_pass import embedded, estimate, grams, in_files, perplexity, through, write_spooled
from fw.pretrained.calibration import CalibrationText
from fw.pretrained.new_directory import new_directory
from fw.pretrained.reading import plugin_for
from fw.pretrained.rewriting import Look, Report, Source, check_memory, device_here, report

LAYERS = "layers"


@dataclass
class _Scores:
    """What blocks add, in order, and what each of a width adds to each block, by its word."""

    blocks: list[float] = field(default_factory=list)
    inside: list[dict[str, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _Kept:
    """Numbers of blocks that stay, in order; and of what stays of each width, for each of all blocks, by its word."""

    blocks: Sequence[int]
    inside: Sequence[Mapping[str, Tensor]]


def prune(source: str | Path, to: str | Path, keep: Mapping[str, int], look: Look, tell: Say) -> Report:
    """Write the model directory ``to``, of the same architecture.

    Args:
        keep: how many stay: ``layers`` blocks, and of each block by a word of :meth:`CausalLM.widths`.

    Raises:
        UserError: no such model, or it has no such widths or fewer.
    """
    device, found = device_here(), Source(source, look)
    model = found.build().to(found.dtype)
    widths = _widths(model, keep)
    _small(found, _config(model, widths, keep, range(keep.get(LAYERS, len(model.blocks)))), keep)  # before the work, what cannot be read
    text = found.text(tell)
    seen = [model.blocks[0].get_parameter(f"{width.seen_by}.weight") for width in widths.values()]
    needed = estimate(model, [(weight.shape[0], weight.shape[1]) for weight in seen], text, found.dtype)
    check_memory(look, needed, format_size)
    tell(f"{len(model.blocks)} blocks; memory: at most {format_size(needed)}, by estimate")
    with OwnPeak(device) as peak, new_directory(Path(to)) as made:
        runner = found.runner(model, device)
        scores, before = _look(runner, text, widths)
        kept = _chosen(scores, keep)
        tell(f"left out: {_left_out(scores, kept, widths)}")
        config = _config(model, widths, keep, kept.blocks)
        found.finish(made, config)
        small = _small(found, config, keep)
        spool = made / "spool"
        spool.mkdir()
        files = list(_cut(runner, small, widths, kept, spool))
        total = write_spooled(files, made, parse_size(look.max_shard_size))
        shutil.rmtree(spool)
        after = _judged(BlockByBlock(small, weights_for(TensorFiles(made), small), device), text)
    method = ", ".join(f"{number} {word}" for word, number in keep.items())
    figures = {"perplexity_before": before, "perplexity_after": after, "bytes_after": total}
    return report(found, to, method, len(kept.blocks), text, **figures, estimated_bytes=needed, peak_bytes=peak.bytes)


def _widths(model: CausalLM, keep: Mapping[str, int]) -> dict[str, Width]:
    known = model.widths()
    for word, number in keep.items():
        if word != LAYERS and word not in known:
            raise UserError(f"--{word}: {type(model).__name__} has none that can be left out (there are: {', '.join([LAYERS, *known])})")
        there = len(model.blocks) if word == LAYERS else known[word].number
        if not 0 < number <= there:
            raise UserError(f"--{word}: {number} of {there} cannot stay; from 1 to {there} can")
    return {word: known[word] for word in keep if word != LAYERS}


def _look(runner: BlockByBlock, text: CalibrationText, widths: Mapping[str, Width]) -> tuple[_Scores, float]:
    """Scores, and the perplexity of the model as it is."""
    scores = _Scores()
    states, held_out = embedded(runner, text.ids_NL), embedded(runner, text.held_out_ids_ML)
    for number in Bar(range(len(runner.model.blocks)), desc="looking", unit=" blocks"):
        with runner.block(number) as block:
            names = {word: f"{runner.name(block)}.{width.seen_by}.weight" for word, width in widths.items()}
            seen = grams(runner, number, list(names.values()), states) if names else {}
            scores.inside.append({word: _added(runner.model, name, seen[name], widths[word].number) for word, name in names.items()})
            before = [x_BLD.clone() for x_BLD in states]
            through(runner, number, states)
            alike = [F.cosine_similarity(a.float(), b.float(), dim=-1).mean() for a, b in zip(before, states, strict=True)]
            scores.blocks.append(1 - float(torch.stack(alike).mean()))
            through(runner, number, held_out)
    return scores, perplexity(runner, text, held_out)


def _added(model: CausalLM, name: str, gram_II: Tensor, number: int) -> Tensor:
    """What each of a width adds ``[number]``: tr(W G Wᵀ) of its columns."""
    weight_OI = model.get_parameter(name).detach().float()
    weight_NOi = weight_OI.unflatten(1, (number, -1)).transpose(0, 1)
    own_Nii = torch.stack([gram_II[at : at + weight_NOi.shape[2], at : at + weight_NOi.shape[2]] for at in _starts(gram_II, number)])
    return ((weight_NOi @ own_Nii) * weight_NOi).sum((1, 2))


def _starts(gram_II: Tensor, number: int) -> range:
    return range(0, len(gram_II), len(gram_II) // number)


def _chosen(scores: _Scores, keep: Mapping[str, int]) -> _Kept:
    """The highest of each, the first of equal ones, in their order."""

    def highest(found: Tensor, number: int) -> Tensor:
        return found.argsort(descending=True, stable=True)[:number].sort().values

    blocks = highest(torch.tensor(scores.blocks), keep.get(LAYERS, len(scores.blocks)))
    return _Kept(blocks.tolist(), [{word: highest(added, keep[word]) for word, added in each.items()} for each in scores.inside])


def _left_out(scores: _Scores, kept: _Kept, widths: Mapping[str, Width]) -> str:
    gone = [number for number in range(len(scores.blocks)) if number not in kept.blocks]
    words = [f"block {number} (influence {scores.blocks[number]:.3f})" for number in gone]
    for word in widths:
        parts = [float(scores.inside[n][word][kept.inside[n][word]].sum() / scores.inside[n][word].sum()) for n in kept.blocks]
        words.append(f"of {word} what adds {1 - min(parts):.1%} to a block at most")
    return ", ".join(words) or "nothing"


def _config(model: CausalLM, widths: Mapping[str, Width], keep: Mapping[str, int], blocks: Sequence[int]) -> dict[str, Any]:
    """``config.json`` of what stays."""
    config = model.hf_config() if len(blocks) == len(model.blocks) else model.hf_config_of(blocks)
    for word, width in widths.items():
        config |= {name: each * keep[word] for name, each in width.fields.items()}
    return config


def _small(source: Source, config: Mapping[str, Any], keep: Mapping[str, int]) -> CausalLM:
    try:
        plugin = plugin_for(source.directory, config)
    except UserError as error:
        words = " ".join(f"--{word} {number}" for word, number in keep.items())
        raise UserError(f"{words}: such a model cannot be: {error}") from None
    assert plugin.vocab_size is not None
    with torch.device("meta"):
        return plugin.build(plugin.vocab_size, source.length, source.attention).to(source.dtype)


def _cut(runner: BlockByBlock, small: CausalLM, widths: Mapping[str, Width], kept: _Kept, spool: Path) -> list[TensorFiles]:
    """The smaller model's tensors, in files of the spool directory."""
    save_file(_all(small, runner.outside()), spool / "outside.safetensors", metadata={"format": "pt"})
    own = {id(module): name for name, module in small.named_modules()}
    for at, number in enumerate(Bar(kept.blocks, desc="writing", unit=" blocks")):
        with runner.block(number) as block:
            tensors = {
                f"{own[id(small.blocks[at])]}.{name}": _sliced(name, parameter.detach(), widths, kept.inside[number])
                for name, parameter in block.named_parameters()
            }
            save_file(_all(small, tensors), spool / f"block-{at}.safetensors", metadata={"format": "pt"})
    return [TensorFiles(spool, stem) for stem in ("outside", *(f"block-{n}" for n in range(len(kept.blocks))))]


def _all(model: CausalLM, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found |= in_files(model, name, tensor.detach())
    return found


def _sliced(name: str, tensor: Tensor, widths: Mapping[str, Width], kept: Mapping[str, Tensor]) -> Tensor:
    for word, width in widths.items():
        if name in width.cut:
            dim, rows = width.cut[name]
            chosen = (kept[word].to(tensor.device)[:, None] * rows + torch.arange(rows, device=tensor.device)).flatten()
            tensor = tensor.index_select(dim, chosen)
    return tensor


def _judged(runner: BlockByBlock, text: CalibrationText) -> float:
    """Perplexity."""
    states = embedded(runner, text.held_out_ids_ML)
    for number in range(len(runner.model.blocks)):
        with runner.block(number):
            through(runner, number, states)
    return perplexity(runner, text, states)
