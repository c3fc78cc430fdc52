"""Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) in the half-split layout of Hugging Face's Llama, and the
ways to stretch it over longer contexts than it was trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from fw.api import UserError
from fw.api.kernels import differentiable, elementwise

Angles = tuple[Tensor, Tensor]
"""Cosines and sines, ``[B, 1, L, H]``."""


@dataclass(unsafe_hash=True)
class RopeScaling:
    """How rotary frequencies are stretched; the fields that a type does not use stay empty."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"] = field(default="linear", metadata={"variant": True})
    """`linear`: positions ÷ factor. `dynamic`: a larger base once a batch is longer than max_position_embeddings. `yarn`: by
    frequency, with hotter attention. `llama3`: low frequencies only."""
    factor: float = 1.0
    """How much longer the context becomes; 1 or more."""
    original_max_position_embeddings: int | None = None
    """Context the weights were trained on (yarn, llama3); empty for max_position_embeddings."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original context ÷ this are stretched in full; required there."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original context ÷ this stay; required there."""
    attention_factor: float | None = None
    """yarn: what cosines and sines are multiplied with; empty for 0.1 · ln(factor) + 1."""
    beta_fast: float | None = None
    """yarn: dimensions that turn more often than this over the original context stay; empty for 32."""
    beta_slow: float | None = None
    """yarn: dimensions that turn less often than this are stretched in full; empty for 1."""
    mscale: float | None = None
    """yarn, DeepSeek's variant: with mscale_all_dim, attention_factor is the quotient of both."""
    mscale_all_dim: float | None = None
    """yarn, DeepSeek's variant: see mscale."""
    truncate: bool = True
    """yarn: round the range of stretched dimensions to whole ones."""

    def __post_init__(self) -> None:
        own: dict[str, tuple[str, ...]] = {
            "linear": (),
            "dynamic": (),
            "yarn": (
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
        }
        for given in fields(self):
            changed = getattr(self, given.name) != given.default
            if changed and given.name not in ("rope_type", "factor", *own[self.rope_type]):
                raise UserError(f"model.rope_scaling.{given.name}: means nothing to rope_type {self.rope_type}; leave it out")
        if self.factor < 1:
            raise UserError(f"model.rope_scaling.factor: {self.factor} is below 1")
        original = self.original_max_position_embeddings
        if original is not None and original < 1:
            raise UserError(f"model.rope_scaling.original_max_position_embeddings: {original} is too small; the least is 1")
        if self.rope_type == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            if low is None or high is None or not 0 < low < high:
                raise UserError("model.rope_scaling: rope_type llama3 needs low_freq_factor and high_freq_factor, the first the smaller")

    @property
    def needs_context(self) -> bool:
        """Whether max_position_embeddings decides the frequencies."""
        return self.rope_type == "dynamic" or (self.rope_type in ("yarn", "llama3") and self.original_max_position_embeddings is None)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of one kind: head dimension H, base, and how it is stretched.

    Attributes:
        context: max_position_embeddings of the model, what ``dynamic`` compares with and others take for the original context.
    """

    head_dim: int
    theta: float
    scaling: RopeScaling | None = None
    context: int | None = None

    def angles(self, positions_BL: Tensor) -> Angles:
        """Cosines and sines ``[B, 1, L, H]`` in fp32 of ``position · frequency``, each twice: for both halves of a head."""
        frequencies_h, attention_factor = self._frequencies(positions_BL)
        angles_BLh = positions_BL[..., None].float() * frequencies_h
        angles_B1LH = torch.cat((angles_BLh, angles_BLh), dim=-1)[:, None]
        return angles_B1LH.cos() * attention_factor, angles_B1LH.sin() * attention_factor

    def _frequencies(self, positions_BL: Tensor) -> tuple[Tensor, float]:
        device = positions_BL.device
        exponents_h = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.int64).float() / self.head_dim
        scaling = self.scaling
        if scaling is None:
            return 1.0 / self.theta**exponents_h, 1.0
        if scaling.rope_type == "dynamic":
            assert self.context is not None
            # The base follows the batch's longest position, as a tensor: nothing waits for the device.
            length = (positions_BL.max() + 1).clamp(min=self.context)
            grown = self.theta * (scaling.factor * length / self.context - (scaling.factor - 1)) ** (self.head_dim / (self.head_dim - 2))
            return 1.0 / grown**exponents_h, 1.0
        frequencies_h = 1.0 / self.theta**exponents_h
        if scaling.rope_type == "linear":
            return frequencies_h / scaling.factor, 1.0
        original = scaling.original_max_position_embeddings or self.context
        assert original is not None
        if scaling.rope_type == "llama3":
            return _llama3(frequencies_h, scaling, original), 1.0
        return _yarn(frequencies_h, scaling, original, self.head_dim, self.theta), _yarn_attention_factor(scaling)


def _llama3(frequencies_h: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Long wavelengths ÷ factor, short ones kept, a linear passage between (Llama 3.1, https://arxiv.org/abs/2407.21783)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None and high is not None
    turns_h = original * frequencies_h / (2 * math.pi)
    kept_h = ((turns_h - low) / (high - low)).clamp(0, 1)
    return frequencies_h * (kept_h + (1 - kept_h) / scaling.factor)


def _yarn(frequencies_h: Tensor, scaling: RopeScaling, original: int, head_dim: int, theta: float) -> Tensor:
    """NTK by parts (Peng et al. 2023, https://arxiv.org/abs/2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """The dimension that turns so often over the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast or 32), dimension(scaling.beta_slow or 1)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    at_h = torch.arange(head_dim // 2, dtype=torch.float32, device=frequencies_h.device)
    stretched_h = ((at_h - low) / (high - low)).clamp(0, 1)
    return frequencies_h * (1 - stretched_h + stretched_h / scaling.factor)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def heat(scale: float) -> float:
        return 0.1 * scale * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return heat(scaling.mscale) / heat(scaling.mscale_all_dim)
    return heat(1.0)


def rotate(x_BNLH: Tensor, angles: Angles) -> Tensor:
    """Rotate the pairs ``(x_i, x_{i+H/2})``; computed in the dtype of ``x``."""
    cos_B1LH, sin_B1LH = angles
    for kernels in (differentiable, elementwise):
        if (at_once := kernels.rotate(x_BNLH, cos_B1LH, sin_B1LH)) is not None:
            return at_once
    first, second = x_BNLH.chunk(2, dim=-1)
    turned_BNLH = torch.cat((-second, first), dim=-1)
    return x_BNLH * cos_B1LH.to(x_BNLH.dtype) + turned_BNLH * sin_B1LH.to(x_BNLH.dtype)
