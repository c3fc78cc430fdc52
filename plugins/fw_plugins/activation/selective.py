"""Recomputation by operator: blocks keep the results that are dear to compute, and compute the rest again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import fw.api.kernels  # noqa: F401  whose operators are torch's from then on
from fw.api import ActivationPlugin, CausalLM, StepSpec, UserError
from fw_plugins.activation.keeping import keeping
from fw_plugins.activation.recompute import recompute

_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "convolution")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
_OWN = "fw.causal_attention"
"""Of the CPU."""
_FLASH_ATTN = ("_flash_attn_forward", "_flash_attn_varlen_forward")
"""The package's, which need not be there."""
GROUPS = {
    "matmul": frozenset(f"aten.{op}" for op in _MATMUL),
    "attention": frozenset((*(f"aten.{op}" for op in _ATTENTION), *(f"flash_attn.{op}" for op in _FLASH_ATTN), _OWN)),
}


@dataclass
class SelectiveConfig:
    """Which results stay."""

    save: list[str] = field(default_factory=lambda: ["matmul", "attention"])
    """Operators whose results stay: `matmul` (matrix products of every kind), `attention` (the fused attention kernels), or names of
    operators, like `aten.mul`. What fw's own kernels compute on a CPU torch's operators do not: `fw.silu_mul` is the gate
    with its product, `fw.rms_norm` a norm, `fw.rotate` the rotation."""
    matmul_every: int = 2
    """Of the matrix products of a block every n-th result stays; 1 for all."""

    def __post_init__(self) -> None:
        if self.matmul_every < 1:
            raise UserError(f"activation.matmul_every: {self.matmul_every} is too small; the least is 1")
        if not self.save:
            raise UserError("activation.save: empty, so that everything would be recomputed; use activation=full")
        for name in self.save:
            operators(name)


def operators(name: str) -> frozenset[str]:
    """The names of the operators that a name stands for.

    Raises:
        UserError: torch knows no such.
    """
    if name in GROUPS:
        return GROUPS[name]
    namespace, _, op = name.partition(".")
    if not op or not hasattr(getattr(torch.ops, namespace), op):
        raise UserError(f"activation.save: torch has no operator '{name}'; name groups ({', '.join(GROUPS)}) or operators like aten.mul")
    packet = getattr(getattr(torch.ops, namespace), op)
    if all(getattr(packet, overload)._schema.is_mutable for overload in packet.overloads()):
        raise UserError(f"activation.save: {name} overwrites what it is given, so that its result cannot be kept")
    return frozenset({str(packet)})


class Selective(ActivationPlugin):
    """Blocks keep the results of attention and of every second matrix product, and compute the rest again: less time than `full`."""

    api = 1
    Config = SelectiveConfig
    config: SelectiveConfig

    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """Every block by the same rule."""
        saved = frozenset().union(*(operators(name) for name in self.config.save))
        for block in model.blocks:
            recompute(block, keeping(lambda: _EveryNth(saved, self.config.matmul_every)))


class _EveryNth:
    def __init__(self, saved: frozenset[str], matmul_every: int) -> None:
        self._saved, self._every = saved, matmul_every
        self._products = 0

    def __call__(self, packet: Any, number: int) -> bool:
        name = str(packet)
        if name not in self._saved or name not in GROUPS["matmul"]:
            return name in self._saved
        self._products += 1
        return self._products % self._every == 0
