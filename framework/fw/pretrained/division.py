"""Layers of a model divided between ranks, for computing alone: each rank reads its part of the files, and nothing else of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fw.checkpointing.placement import Cut
from fw.errors import UserError
from fw.kinds.checkpoint import Kept
from fw.kinds.model import CausalLM, KVShape
from fw.kinds.peft import LowRankChange
from fw.kinds.tensor_plan import TensorPlan, fits, given, plan_for


@dataclass(frozen=True)
class _Cut:
    """How a tensor is cut: ranges of ``dim`` that follow one another in this rank's part."""

    shape: torch.Size
    dim: int
    ranges: Sequence[slice]


class Division:
    """This rank's part of a model.

    Args:
        option: that asks for it.
    """

    plan: TensorPlan

    def __init__(self, rank: int, ranks: int, option: str) -> None:
        self.rank, self.ranks, self._option = rank, ranks, option
        self._cut: dict[str, _Cut] = {}

    def cut(self, model: CausalLM) -> None:
        """Leave this rank's part of each parameter of a model on the meta device.

        Raises:
            UserError: it cannot be divided so.
        """
        self.plan = plan_for(model, self.ranks, self._option)
        for name, module in list(model.named_modules()):
            for own, parameter in list(module.named_parameters(recurse=False)):
                whole = f"{name}.{own}".lstrip(".")
                if (dim := given(self.plan.split, whole)) is None:
                    continue
                size = parameter.shape[dim]
                cut = _Cut(parameter.shape, dim, [self._range(size)] if dim else self._ranges(name, size))
                sizes = list(parameter.shape)
                sizes[dim] = sum(part.stop - part.start for part in cut.ranges)
                if not sizes[dim]:
                    raise UserError(f"{self._option}: {whole} has {size} rows, which are too few for {self.ranks} ranks")
                self._cut[whole] = cut
                part = nn.Parameter(torch.empty(sizes, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad)
                module.register_parameter(own, part)
                _tell_sizes(module, own)

    def pieces(self, tensors: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor | Kept]]:
        """The tensors of this rank, which together are to be filled; some are in several pieces of the whole."""
        turns: list[dict[str, Tensor | Kept]] = [{}]
        for name, tensor in tensors.items():
            if (cut := self._cut.get(name)) is None:
                turns[0][name] = tensor
                continue
            begin = 0
            for turn, part in enumerate(cut.ranges):
                if turn == len(turns):
                    turns.append({})
                size = part.stop - part.start
                where = [slice(0, whole) for whole in cut.shape]
                where[cut.dim] = part
                turns[turn][name] = Cut(tensor.narrow(cut.dim, begin, size), tuple(where), cut.shape, tensor.dtype)
                begin += size
        yield from turns

    @torch.no_grad()
    def finish(self, model: CausalLM) -> None:
        """What a sum over ranks wants once, the first one has."""
        for name, parameter in model.named_parameters():
            if self.rank and fits(self.plan.once, name):
                parameter.zero_()

    def first(self, name: str) -> int:
        """Of the rows of a parameter that is cut into rows, the first that this rank has."""
        return self._cut[name].ranges[0].start

    def most(self, size: int) -> int:
        """Of so many, that any rank has."""
        return -(-size // self.ranks)

    def kv_shapes(self, model: CausalLM) -> list[KVShape]:
        """What this rank keeps of a token; a single key and value head is every rank's."""
        return [replace(shape, heads=shape.heads // self.ranks if shape.heads > 1 else 1) for shape in model.kv_shapes]

    def low_rank(self, changes: Mapping[str, LowRankChange]) -> dict[str, LowRankChange]:
        """This rank's part of changes to layers, by their names."""
        return {name: self._part_of(name, change) for name, change in changes.items()}

    def _part_of(self, name: str, change: LowRankChange) -> LowRankChange:
        dim = given(self.plan.split, f"{name}.weight")
        if dim is None:
            return change
        if dim == 0:
            ranges = self._ranges(name, len(change.up_OR))
            return replace(change, up_OR=torch.cat([change.up_OR[part] for part in ranges]))
        return replace(change, down_RI=change.down_RI[:, self._range(change.down_RI.shape[1])].contiguous())

    def _ranges(self, layer: str, rows: int) -> list[slice]:
        """Of the rows of a layer, of each of the projections that are in it."""
        several = given(self.plan.fused, layer) or 1
        each = rows // several
        own = self._range(each)
        return [slice(number * each + own.start, number * each + own.stop) for number in range(several)]

    def _range(self, size: int) -> slice:
        """Of as many as that; the last ranks have fewer where they do not divide."""
        each = self.most(size)
        return slice(min(size, each * self.rank), min(size, each * (self.rank + 1)))


def _tell_sizes(module: nn.Module, parameter: str) -> None:
    """To a layer that knows them."""
    if isinstance(module, nn.Linear) and parameter == "weight":
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Embedding):
        module.num_embeddings = len(module.weight)
