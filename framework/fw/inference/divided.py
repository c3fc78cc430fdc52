"""A model whose layers are divided between ranks, which all see the whole of what lies between layers: their parts of sums are added up,
and logits of their parts of the vocabulary are gathered (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from fw.inference.collective import Collective
from fw.kinds.model import CausalLM, KVShape
from fw.kinds.peft import LowRankChange
from fw.kinds.tensor_plan import fits
from fw.pretrained.division import Division

if TYPE_CHECKING:
    from fw.inference.adapters import Adapter
    from fw.inference.cached import Piece
    from fw.inference.steady import Way


class Ranks:
    """Those that a model's layers are divided between: this process alone.

    Attributes:
        hooks: forward hooks of the model that are of the division.
    """

    rank, ranks, hooks = 0, 1, 0
    division: Division | None = None

    @property
    def repeatable(self) -> bool:
        """Whether a recording of steps has what ranks do together."""
        return True

    def join(self, model: CausalLM) -> None:
        """Let the parts of a model compute what the whole one does, but for the head."""

    def whole_logits(self, parts_Rv: Tensor, vocab_size: int) -> Tensor:
        """``[R, V]`` on the first rank, of all ranks' parts of the vocabulary; on others this rank's."""
        return parts_Rv

    def kv_shapes(self, model: CausalLM) -> Sequence[KVShape]:
        """What this rank keeps of a token."""
        return model.kv_shapes

    def low_rank(self, changes: Mapping[str, LowRankChange]) -> Mapping[str, LowRankChange]:
        """This rank's part of changes to layers, by their names."""
        return changes

    def agreed(self, value: int) -> int:
        """What the first rank says."""
        return value

    @contextmanager
    def step(self, pieces: Sequence[Piece], way: Way) -> Iterator[None]:
        """Around what computes these, that way."""
        yield

    def loaded(self, adapter: Adapter, directory: str) -> None:
        """One that requests may ask for from now on."""


class Several(Ranks):
    """With others.

    Args:
        option: that asks for them.
    """

    division: Division

    def __init__(self, rank: int, ranks: int, option: str, collective: Collective) -> None:
        self.rank, self.ranks, self.collective = rank, ranks, collective
        self.division = Division(rank, ranks, option)

    @property
    def repeatable(self) -> bool:
        """Where they are kernels."""
        return self.collective.repeatable

    def join(self, model: CausalLM) -> None:
        """After layers, sums; and rows of the embedding that others have."""
        plan = self.division.plan
        for name, module in model.named_modules():
            if fits(plan.partial_output, name):
                module.register_forward_hook(_Sum(self.collective))
                self.hooks += 1
            if fits(plan.vocabulary, name):
                assert isinstance(module, nn.Embedding)
                module.forward = _Rows(module, self.division.first(f"{name}.weight"), self.collective)  # type: ignore[method-assign, assignment]

    def whole_logits(self, parts_Rv: Tensor, vocab_size: int) -> Tensor:
        """Gathered."""
        most = self.division.most(vocab_size)
        parts_TRv = self.collective.gather(F.pad(parts_Rv, (0, most - parts_Rv.shape[1])))
        return parts_Rv if self.rank else parts_TRv.transpose(0, 1).flatten(1)[:, :vocab_size]

    def kv_shapes(self, model: CausalLM) -> Sequence[KVShape]:
        """Of its heads."""
        return self.division.kv_shapes(model)

    def low_rank(self, changes: Mapping[str, LowRankChange]) -> Mapping[str, LowRankChange]:
        """As its part of the layers sees them."""
        return self.division.low_rank(changes)


class _Sum:
    """After a layer whose output is this rank's part of a sum; of a tuple, the first."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective

    def __call__(self, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._collective.add_up(output[0]), *output[1:])
        return self._collective.add_up(output)


class _Rows:
    """An embedding of which this rank has some rows: others' tokens are zero."""

    def __init__(self, module: nn.Embedding, first: int, collective: Collective) -> None:
        self._module, self._first, self._collective = module, first, collective

    def __call__(self, ids_BL: Tensor) -> Tensor:
        weight_vD = self._module.weight
        rows_BL = ids_BL - self._first
        others_BL = (rows_BL < 0) | (rows_BL >= len(weight_vD))
        x_BLD = F.embedding(rows_BL.masked_fill(others_BL, 0), weight_vD)
        return self._collective.add_up(x_BLD.masked_fill(others_BL[..., None], 0))
