"""How keys and values of a token are kept: as they were computed, or in fewer bits.

Each head's numbers are a row of bytes, whatever they mean: S slots, K heads, R bytes; T tokens, H numbers of a head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fw.api import KVShape
from fw.api.kernels import Rows


class Keeping(ABC):
    """A way to keep numbers that were computed in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @abstractmethod
    def row_bytes(self, dim: int) -> int:
        """Of a head's row."""

    def rows(self, dim: int) -> Rows | None:
        """For the kernels; None where they do not know it."""
        return None

    def token_bytes(self, shape: KVShape) -> int:
        """Keys and values of a token, in one block of the model."""
        return 2 * shape.heads * self.row_bytes(shape.head_dim)

    @abstractmethod
    def encode(self, x_TKH: Tensor) -> Tensor:
        """uint8 ``[T, K, R]``."""

    @abstractmethod
    def decode(self, rows_TKR: Tensor, dim: int) -> Tensor:
        """``[…, K, dim]`` as they are computed with."""


class Plain(Keeping):
    """As they are."""

    def row_bytes(self, dim: int) -> int:
        """All numbers."""
        return dim * self.dtype.itemsize

    def rows(self, dim: int) -> Rows | None:
        """Of fp32, bf16, and fp16, which kernels of GPUs know."""
        rows = {torch.float32: Rows("fp32", dim, dim), torch.bfloat16: Rows("bf16", dim, dim), torch.float16: Rows("fp16", dim, dim)}
        return rows.get(self.dtype)

    def encode(self, x_TKH: Tensor) -> Tensor:
        """Their bytes."""
        return x_TKH.contiguous().view(torch.uint8)

    def decode(self, rows_TKR: Tensor, dim: int) -> Tensor:
        """The numbers that these are the bytes of."""
        return rows_TKR.view(self.dtype)


class Int8(Keeping):
    """Codes of -127 … 127, with a scale in bfloat16 for each group of a row."""

    def __init__(self, dtype: torch.dtype, group: int) -> None:
        super().__init__(dtype)
        self._group = group

    def rows(self, dim: int) -> Rows:
        """Groups are a multiple of 16 that divides the row; else there is one."""
        return Rows("int8", dim, self._group if dim % self._group == 0 and self._group % 16 == 0 else dim)

    def row_bytes(self, dim: int) -> int:
        """Codes and scales."""
        return self.rows(dim).bytes

    def encode(self, x_TKH: Tensor) -> Tensor:
        """``round(x / scale)`` with the scale that makes the group's largest 127."""
        x_TKGH = x_TKH.float().unflatten(-1, (-1, self.rows(x_TKH.shape[-1]).group))
        scales_TKG = (x_TKGH.abs().amax(-1) / 127).bfloat16()
        by_TKG1 = torch.where(scales_TKG > 0, 1 / scales_TKG.float(), 0.0)[..., None]
        codes = (x_TKGH * by_TKG1).round().clamp(-127, 127).to(torch.int8).flatten(-2)
        return torch.cat([codes.view(torch.uint8), scales_TKG.view(torch.uint8)], -1)

    def decode(self, rows_TKR: Tensor, dim: int) -> Tensor:
        """Codes times scales."""
        codes = rows_TKR[..., :dim].view(torch.int8).float().unflatten(-1, (-1, self.rows(dim).group))
        scales = rows_TKR[..., dim:].contiguous().view(torch.bfloat16).float()
        return (codes * scales[..., None]).flatten(-2).to(self.dtype)


class Int4(Keeping):
    """Codes of 0 … 15 between the smallest and the largest number of each group of a row."""

    def __init__(self, dtype: torch.dtype, group: int) -> None:
        super().__init__(dtype)
        self._group = group

    def rows(self, dim: int) -> Rows:
        """Groups divide half of the row, whose second half lies in the high bits of the first; else there are two."""
        half = dim // 2
        return Rows("int4", dim, self._group if half % self._group == 0 else half)

    def row_bytes(self, dim: int) -> int:
        """Codes, and step and smallest number of each group."""
        return self.rows(dim).bytes

    def encode(self, x_TKH: Tensor) -> Tensor:
        """``round((x - smallest) / step)``."""
        x_TKGH = x_TKH.float().unflatten(-1, (-1, self.rows(x_TKH.shape[-1]).group))
        from_TKG = x_TKGH.amin(-1).bfloat16()
        step_TKG = ((x_TKGH.amax(-1) - from_TKG.float()) / 15).bfloat16()
        by_TKG1 = torch.where(step_TKG > 0, 1 / step_TKG.float(), 0.0)[..., None]
        codes = ((x_TKGH - from_TKG.float()[..., None]) * by_TKG1).round().clamp(0, 15).to(torch.uint8).flatten(-2)
        low, high = codes.chunk(2, -1)
        scales_TKG2 = torch.stack([step_TKG, from_TKG], -1).flatten(-2)
        return torch.cat([low | (high << 4), scales_TKG2.view(torch.uint8)], -1)

    def decode(self, rows_TKR: Tensor, dim: int) -> Tensor:
        """Codes times steps, from the smallest number on."""
        packed = rows_TKR[..., : dim // 2]
        codes = torch.cat([packed & 15, packed >> 4], -1).float().unflatten(-1, (-1, self.rows(dim).group))
        scales = rows_TKR[..., dim // 2 :].contiguous().view(torch.bfloat16).float().unflatten(-1, (-1, 2))
        return (codes * scales[..., :1] + scales[..., 1:]).flatten(-2).to(self.dtype)


class Float8(Keeping):
    """``float8_e4m3fn``, with a scale in fp32 for each row."""

    def row_bytes(self, dim: int) -> int:
        """Numbers and scale."""
        return dim + 4

    def encode(self, x_TKH: Tensor) -> Tensor:
        """The largest number of a row becomes the largest there is, 448."""
        scale_TK1 = (x_TKH.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
        codes = (x_TKH.float() / scale_TK1).to(torch.float8_e4m3fn)
        return torch.cat([codes.view(torch.uint8), scale_TK1.view(torch.uint8)], -1)

    def decode(self, rows_TKR: Tensor, dim: int) -> Tensor:
        """Numbers times scale."""
        scale = rows_TKR[..., dim:].contiguous().view(torch.float32)
        return (rows_TKR[..., :dim].contiguous().view(torch.float8_e4m3fn).float() * scale).to(self.dtype)
