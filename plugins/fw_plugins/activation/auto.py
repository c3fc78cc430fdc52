"""Recomputation of what costs least, within a number of bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fw.api import ActivationPlugin, CausalLM, RunError, StepSpec, UserError, format_size, parse_size
from fw_plugins.activation.choosing import Choice, choose, least_bytes
from fw_plugins.activation.keeping import keeping
from fw_plugins.activation.profiling import BlockProfile, profile
from fw_plugins.activation.recompute import recomputing


@dataclass
class AutoConfig:
    """How much may stay."""

    budget: str = ""
    """Bytes that the blocks of a rank may keep between forward and backward of a micro-batch, like `6GiB`."""

    def __post_init__(self) -> None:
        if not self.budget:
            raise UserError("activation.budget: empty; say how much the blocks' activations may take, like 6GiB, or use another activation")
        parse_size(self.budget)


class Auto(ActivationPlugin):
    """Each block keeps the results that are dearest to compute for their bytes, so that all of them together fit a budget.

    The first forward is recomputed in full and every operator in it noted, with bytes and FLOPs; from the second on the choice holds that
    costs least. It depends on shapes alone, which must not vary, and rank 0 makes it for all.
    """

    api = 1
    Config = AutoConfig
    config: AutoConfig
    _chooser: _Chooser | None = None

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """A choice made for the first shape holds for no longer one, and ranks with different choices would wait for each other."""
        if spec.lengths_vary:
            raise UserError(
                "activation: auto chooses for rows of one length, and those of this run vary; set train.packing=true, or use full or"
                " selective"
            )

    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """Blocks get their choice when all have been seen."""
        blocks = model.blocks
        self._chooser = chooser = _Chooser(parse_size(self.config.budget), len(blocks))
        for number, block in enumerate(blocks):
            block.forward = chooser.chosen(number, block, block.forward)

    def change_precision(self) -> None:
        """The next forward is observed anew, and what follows chosen by it."""
        if self._chooser is not None:
            self._chooser.forget()


class _Chooser:
    def __init__(self, budget_bytes: int, blocks: int) -> None:
        self._budget_bytes = budget_bytes
        self._profiles: list[BlockProfile | None] = [None] * blocks
        self._forwards: list[Callable[..., Any]] = []
        self._observing: list[Callable[..., Any]] = []
        self._making: list[Callable[[Choice], Callable[..., Any]]] = []

    def chosen(self, number: int, block: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A block's forward, first observed, then as chosen."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if number == 0 and None not in self._profiles:
                self._decide([profile for profile in self._profiles if profile is not None])
                return self._forwards[number](*args, **kwargs)
            parameters = [p for module in block.modules() for p in module._parameters.values() if p is not None]
            self._profiles[number] = profile(forward, parameters, args, kwargs)
            return again(*args, **kwargs)

        again = recomputing(block, forward)
        self._observing.append(torch.compiler.disable(observed))
        self._forwards.append(self._observing[number])
        self._making.append(lambda choice: _as_chosen(choice, block, forward))
        return lambda *args, **kwargs: self._forwards[number](*args, **kwargs)

    def forget(self) -> None:
        """Observe again from the next forward on."""
        self._profiles = [None] * len(self._profiles)
        self._forwards = list(self._observing)

    def _decide(self, profiles: Sequence[BlockProfile]) -> None:
        least = least_bytes(profiles)
        decided: list[Any] = [choose(profiles, self._budget_bytes) if least <= self._budget_bytes else None]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(decided, src=0)  # routers may send ranks different numbers of tokens
        choices: list[Choice] | None = decided[0]
        if choices is None:
            raise RunError(
                f"activation.budget: {format_size(self._budget_bytes)} is less than the {format_size(least)} that stay where every block"
                " is recomputed; give more, or lower train.micro_batch_size or train.max_tokens_per_batch"
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"fw: {_told(profiles, choices, self._budget_bytes)}", file=sys.stderr)
        self._forwards = [make(choice) for make, choice in zip(self._making, choices, strict=True)]


def _as_chosen(choice: Choice, block: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    if not choice.recomputes:
        return forward
    keeps = choice.keeps
    return recomputing(block, forward, keeping(lambda: lambda packet, number: (str(packet), number) in keeps) if keeps else None)


def kept_bytes(block: BlockProfile, choice: Choice) -> int:
    """What stays of a block."""
    if not choice.recomputes:
        return block.saved_bytes
    return block.input_bytes + sum(operation.kept_bytes for operation in block.operations if operation.key in choice.keeps)


def repeated_cost(block: BlockProfile, choice: Choice) -> float:
    """What is computed again."""
    return sum(operation.cost for operation in block.operations if operation.key not in choice.keeps) if choice.recomputes else 0.0


def _told(profiles: Sequence[BlockProfile], choices: Sequence[Choice], budget_bytes: int) -> str:
    pairs = list(zip(profiles, choices, strict=True))
    kept = sum(kept_bytes(*pair) for pair in pairs)
    again = sum(repeated_cost(*pair) for pair in pairs) / max(sum(profile.cost for profile in profiles), 1)
    straight = sum(profile.saved_bytes for profile in profiles)
    whole = sum(not choice.recomputes for choice in choices)
    return (
        f"activations: blocks keep {format_size(kept)} of {format_size(straight)} (budget {format_size(budget_bytes)}) and repeat"
        f" {again:.0%} of their forward; {whole} of {len(choices)} repeat nothing"
    )
