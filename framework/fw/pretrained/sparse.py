"""Weights of linear layers set to zero, block by block: those of least magnitude, or that change least of what a layer gives."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from fw.config import format_size
from fw.errors import UserError
from fw.kinds.data import Say
from fw.kinds.model import CausalLM
from fw.pretrained.block_pass import Change, estimate, in_files
from fw.pretrained.rewriting import Look, Report, Source, check_memory, rewrite

METHODS = ("wanda", "magnitude")


@dataclass(frozen=True)
class Sparsity:
    """Which of a row's weights are zero.

    Attributes:
        part: of them, from 0 to 1.
        group: neighbours of which that part is; None for a whole row.
    """

    part: float
    group: int | None = None

    @staticmethod
    def of(text: str) -> Sparsity:
        """``0.5``, or ``2:4``: two of four neighbours stay.

        Raises:
            UserError: it is neither.
        """
        if found := re.fullmatch(r"(\d+):(\d+)", text):
            kept, group = int(found[1]), int(found[2])
            if 0 < kept < group:
                return Sparsity(1 - kept / group, group)
        else:
            try:
                part = float(text)
            except ValueError:
                part = -1
            if 0 < part < 1:
                return Sparsity(part)
        raise UserError(f"--sparsity {text}: a part between 0 and 1, as 0.5, or how many of neighbours stay, as 2:4")

    def mask(self, score_OI: Tensor) -> Tensor:
        """True for what stays: the highest scores of each group, the first of equal ones."""
        groups = score_OI.unflatten(1, (-1, self.group or score_OI.shape[1]))
        size = groups.shape[-1]
        gone = round(self.part * size)
        order = groups.argsort(dim=-1, descending=True, stable=True)
        kept = groups.new_zeros(groups.shape, dtype=bool).scatter_(-1, order[..., : size - gone], True)
        return kept.flatten(1)


def sparsify(source: str | Path, to: str | Path, sparsity: Sparsity, method: str, look: Look, tell: Say) -> Report:
    """Write the model directory ``to``, whose blocks' linear layers have zeros.

    Args:
        method: ``magnitude``; or ``wanda``, |w| · ‖x‖ of each input (Sun et al. 2023, https://arxiv.org/abs/2306.11695).

    Raises:
        UserError: no such model, or what does not fit it.
    """
    if method not in METHODS:
        raise UserError(f"--method {method} is unknown (there are: {', '.join(METHODS)})")
    found = Source(source, look)
    model = found.build().to(found.dtype)
    change = _Zeros(model, sparsity)
    shapes = [(p.shape[0], p.shape[1]) for p in map(model.get_parameter, change.names)]
    if sparsity.group is not None and (odd := [into for _, into in shapes if into % sparsity.group]):
        raise UserError(f"--sparsity: rows of {odd[0]} weights do not divide into groups of {sparsity.group}")
    text = found.text(tell)
    if method == "magnitude":
        text = replace(text, ids_NL=text.ids_NL[:0])
    needed = estimate(model, shapes, text, found.dtype)
    check_memory(look, needed, format_size)
    tell(f"{len(shapes)} layers of {len(model.blocks)} blocks; memory: at most {format_size(needed)}, by estimate")
    tell(_extent(model, change.names))
    return rewrite(found, model, change, text, to, method, needed)


def _extent(model: CausalLM, names: Collection[str]) -> str:
    """Which weights get zeros, and which do not."""
    seen, total = (sum(p.numel() for p in these) for these in (map(model.get_parameter, names), model.parameters()))
    stacked = any(p.dim() > 2 for block in model.blocks for p in block.parameters())
    whole = "stacked experts and their routers, embedding and head" if stacked else "embedding and head"
    return f"zeros among {seen:,} of {total:,} parameters; {whole} stay whole"


class _Zeros(Change):
    """Some weights become zero."""

    doing = "pruning"

    def __init__(self, model: CausalLM, sparsity: Sparsity) -> None:
        self._model, self._sparsity = model, sparsity
        own = {id(module): name for name, module in model.named_modules()}
        inside = [module for block in model.blocks for module in block.modules() if type(module) is nn.Linear]
        # Routers of experts decide; they are small, and stay.
        self._names = [f"{own[id(module)]}.weight" for module in inside if not own[id(module)].endswith(".gate")]

    @property
    def names(self) -> Collection[str]:
        return self._names

    def __call__(self, name: str, weight_OI: Tensor, gram_II: Tensor | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        score_OI = weight_OI.float().abs()
        if gram_II is not None:
            score_OI *= gram_II.diagonal().sqrt()
        pruned_OI = weight_OI * self._sparsity.mask(score_OI)
        return pruned_OI, in_files(self._model, name, pruned_OI)
