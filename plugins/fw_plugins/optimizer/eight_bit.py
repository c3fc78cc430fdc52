"""Optimizer state in 8 bits: block-wise dynamic quantization (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

A block is a piece of a row, of 256 values where rows divide so and of 64 where not, and keeps one fp32 scale: 1.02 or 1.06 bytes per value.
Rows are never cut, so codes and scales are divided over ranks as the parameter is, and a checkpoint fits any number of ranks. The numbers a
code stands for are those of bitsandbytes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fw.api import UserError
from fw_plugins.optimizer.per_parameter import PerParameter, chunks, local, rows


def _numbers(signed: bool) -> tuple[float, ...]:
    found = [0.0, 1.0]
    for decade in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1, device="cpu")
        means = 10.0 ** (decade - 6) * (borders[:-1] + borders[1:]) / 2
        found += means.tolist() + ((-means).tolist() if signed else [])
    return tuple(sorted(found))


_NUMBERS = {signed: _numbers(signed) for signed in (True, False)}
"""Made once, as numbers: a tensor that is made while a plan is traced has no values."""


def numbers(signed: bool) -> tuple[float, ...]:
    """The 256 numbers in [-1, 1] or [0, 1] that a code stands for, in rising order.

    Seven decades, of which each has twice as many numbers as the one below: what a decade loses in range it gains in precision (section 2.2
    of the paper; "dynamic tree quantization").
    """
    return _NUMBERS[signed]


def _table(signed: bool, device: torch.device) -> Tensor:
    """:func:`numbers` as a tensor ``[256]``."""
    return torch.tensor(numbers(signed), device=device)


def quantize(values_RC: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes ``[R, C]`` (uint8), each the nearest, and scales ``[R, C / block]`` (fp32): the largest magnitude of a block."""
    table = _table(signed, values_RC.device)
    blocks = values_RC.view(values_RC.shape[0], -1, block)
    scales = blocks.abs().amax(dim=-1)
    scaled = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(-1)
    codes = torch.bucketize(scaled, (table[1:] + table[:-1]) / 2, out_int32=True)
    return codes.to(torch.uint8).view(values_RC.shape), scales


def dequantize(codes_RC: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Values ``[R, C]`` in fp32."""
    table = _table(signed, codes_RC.device)
    # Not by indexing, which on the CPU takes its indices as int64: twice the bytes of the values.
    values = table.index_select(0, codes_RC.reshape(-1).int()).view(*scales.shape, -1)
    return values.mul_(scales.unsqueeze(-1)).view(codes_RC.shape)


def block_of(parameter: Tensor) -> int | None:
    """Values per scale; None where the state stays in fp32: norms and biases, whose bytes do not count, and rows that do not divide.

    It depends on the length of a row alone, which is the same on any number of ranks.

    Raises:
        UserError: ranks divide the rows into pieces that are not made of whole blocks.
    """
    if parameter.dim() < 2 or parameter.shape[-1] % 64:
        return None
    block = 64 if parameter.shape[-1] % 256 else 256
    if local(parameter).shape[-1] % block:
        pieces = parameter.shape[-1] // local(parameter).shape[-1]
        raise UserError(
            f"sharding.tensor cuts rows of {parameter.shape[-1]} into {pieces} pieces, and 8-bit state comes in blocks of {block}; use"
            " optimizer=adamw_bf16, or fewer ranks along tensor"
        )
    return block


class EightBit(PerParameter):
    """An update, element by element, with moments in 8 bits."""

    moments: ClassVar[dict[str, bool]]
    """Names of what is kept per element, and whether it has a sign."""

    @abstractmethod
    def formula(self, weight: Tensor, grad: Tensor, kept: dict[str, Tensor], step: int, group: dict[str, Any]) -> None:
        """Change ``weight`` and what is kept in place; all in fp32, of the same shape."""

    def first_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Codes of zero, scales of zero."""
        state: dict[str, Tensor] = {"step": torch.zeros(())}
        block = block_of(parameter)
        for name, signed in self.moments.items():
            if block is None:
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
                continue
            state[name] = torch.full_like(parameter, numbers(signed).index(0.0), dtype=torch.uint8)
            kept = local(parameter)
            state[f"{name}_scale"] = _as_divided(
                kept.new_zeros((*kept.shape[:-1], kept.shape[-1] // block), dtype=torch.float32), parameter
            )
        return state

    def update(self, parameter: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """In fp32, some rows at a time."""
        state["step"] += 1
        step = int(state["step"])
        weights, grads = rows(parameter), rows(grad)
        for part in chunks(weights.shape):
            kept = {name: self._read(state, name, part) for name in self.moments}
            weight = weights[part].float()
            self.formula(weight, grads[part].float(), kept, step, group)
            weights[part] = weight
            for name, values in kept.items():
                self._write(state, name, part, values)

    def _read(self, state: dict[str, Tensor], name: str, part: slice) -> Tensor:
        kept = rows(state[name])[part]
        if f"{name}_scale" not in state:
            return kept
        return dequantize(kept, rows(state[f"{name}_scale"])[part], self.moments[name])

    def _write(self, state: dict[str, Tensor], name: str, part: slice, values: Tensor) -> None:
        kept = rows(state[name])
        if f"{name}_scale" not in state:
            kept[part] = values
            return
        scales = rows(state[f"{name}_scale"])
        kept[part], scales[part] = quantize(values, values.shape[1] // scales.shape[1], self.moments[name])


def _as_divided(kept: Tensor, parameter: Tensor) -> Tensor:
    """This rank's scales as a tensor that is divided as the parameter is, of whose shape only the last dimension differs."""
    if not isinstance(parameter, DTensor):
        return kept
    last = parameter.shape[-1] * kept.shape[-1] // max(1, local(parameter).shape[-1])
    shape = torch.Size((*parameter.shape[:-1], last))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(kept, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
