"""How the layers of a model divide between ranks (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053): what a model says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from fw.errors import UserError

if TYPE_CHECKING:
    from fw.kinds.model import CausalLM

_T = TypeVar("_T")


@dataclass(frozen=True)
class TensorPlan:
    """How the layers of a model divide between ranks, by the names of modules and parameters; ``*`` stands for what is between dots.

    Attributes:
        split: parameters of which each rank keeps a part, and the dimension they are cut along. All others are kept whole, and each rank
            sees a part of their gradient.
        vocabulary: embeddings whose rows are cut.
        whole_input: modules whose first argument ``[B, L, …]`` is gathered along the sequence.
        partial_output: modules whose output (the first, of a tuple) is this rank's part of a sum: summed, and scattered along the sequence.
        whole_output: modules whose output is gathered along the sequence.
        repeated_output: modules whose output all ranks compute for the whole sequence, of which each takes its positions.
        fused: linear layers that are several projections in one, and how many.
        once: parameters that every rank adds to its part of a sum, where the sum wants them once.
        sizes: what must be a multiple of the number of ranks, in words; ``attention heads`` among them.
    """

    split: Mapping[str, int]
    vocabulary: frozenset[str] = frozenset()
    whole_input: frozenset[str] = frozenset()
    partial_output: frozenset[str] = frozenset()
    whole_output: frozenset[str] = frozenset()
    repeated_output: frozenset[str] = frozenset()
    fused: Mapping[str, int] = field(default_factory=dict)
    once: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = field(default_factory=dict)


def fits(patterns: Iterable[str], name: str) -> str | None:
    """The pattern that a name fits; None for none."""
    return next((pattern for pattern in patterns if re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name)), None)


def given(patterns: Mapping[str, _T], name: str) -> _T | None:
    """What a pattern gives to the names that fit it."""
    pattern = fits(patterns, name)
    return None if pattern is None else patterns[pattern]


def plan_for(model: CausalLM, ranks: int, option: str, besides: Mapping[str, int] | None = None) -> TensorPlan:
    """The plan by which so many ranks can divide a model.

    Args:
        option: that asks for it.
        besides: what else must be a multiple of the number of ranks, in words.

    Raises:
        UserError: the model has no plan, or one of its sizes is no multiple of ``ranks``; with the values that work.
    """
    plan = model.whole_tensor_plan()
    if plan is None:
        raise UserError(f"{option}: {type(model).__name__} has no plan for dividing its layers; use a reference model, or tensor: 1")
    if model.quantized:
        raise UserError(f"{option}: quantization keeps codes of whole layers, which ranks cannot divide; use tensor: 1")
    if model.quantization is not None and (because := model.quantization.whole_layers_because):
        raise UserError(f"{option}: quantization does not divide layers between ranks, because {because}; use tensor: 1")
    if model.adapters is not None and (because := model.adapters.whole_layers_because):
        raise UserError(f"{option}: peft does not divide layers between ranks, because {because}; use tensor: 1")
    for name, module in model.named_modules():
        if fits(plan.vocabulary, name) and type(module) is not nn.Embedding:
            raise UserError(f"{option}: the rows of {name} are divided between ranks, which do not change it besides; leave it out")
    for what, size in {**plan.sizes, **(besides or {})}.items():
        if size % ranks:
            raise UserError(f"{option}: {ranks} does not divide {size} {what}; what does: {_divisors(size, plan)}")
    return plan


def _divisors(size: int, plan: TensorPlan) -> str:
    sizes = (size, *plan.sizes.values())
    common = [d for d in range(1, min(sizes) + 1) if all(s % d == 0 for s in sizes)]
    return ", ".join(map(str, common[:12]))
