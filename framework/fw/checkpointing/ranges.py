"""safetensors files read by requests for byte ranges, where they cannot be mapped. The interface is that of ``safetensors.safe_open``."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from fw.checkpointing.stream import DTYPES
from fw.place import Place

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_LARGEST_HEADER = 100_000_000
"""Bytes, as safetensors has it."""


class RangeFile:
    """A file of a place.

    Raises:
        SafetensorError: it is no safetensors file.
        OSError: from here and all methods: it cannot be read.
    """

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._name = place, name
        size = place.size(name)
        try:
            (length,) = struct.unpack("<Q", place.read(name, 0, 8))
            if length > min(size, _LARGEST_HEADER):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            self._entries: dict[str, dict[str, Any]] = json.loads(place.read(name, 8, 8 + length))
            self._entries.pop("__metadata__", None)
            self.begin = 8 + length
            for entry in self._entries.values():
                start, end = entry["data_offsets"]
                if not 0 <= start <= end <= size - self.begin:
                    raise ValueError("a tensor that ends beyond the file")
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise SafetensorError(f"{type(error).__name__}: {error}") from None

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._entries)

    def get_slice(self, name: str) -> RangeSlice:
        """A tensor that is read when it is indexed."""
        return RangeSlice(self, self._entries[name])

    def get_tensor(self, name: str) -> Tensor:
        """All of a tensor."""
        return self.get_slice(name)[()]

    def read(self, start: int, end: int) -> bytes:
        """Bytes of the tensors' part of the file."""
        return self._place.read(self._name, self.begin + start, self.begin + end) if end > start else b""


class RangeSlice:
    """A tensor of a :class:`RangeFile`."""

    def __init__(self, file: RangeFile, entry: dict[str, Any]) -> None:
        self._file, self._entry = file, entry

    def get_shape(self) -> list[int]:
        """From the header."""
        return list(self._entry["shape"])

    def get_dtype(self) -> str:
        """As the header says it."""
        return str(self._entry["dtype"])

    def __getitem__(self, wanted: tuple[slice, ...] | slice) -> Tensor:
        """The slices asked for. One request brings the rows they lie in, from the first to the last; columns are cut from those here."""
        shape, dtype = self.get_shape(), _DTYPE_OF[self.get_dtype()]
        slices = wanted if isinstance(wanted, tuple) else (wanted,)
        start, end = self._entry["data_offsets"]
        if not slices or not shape:
            return self._tensor(self._file.read(start, end), dtype, shape)
        first, last, _ = slices[0].indices(shape[0])
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        data = self._file.read(start + first * row_bytes, start + max(first, last) * row_bytes)
        return self._tensor(data, dtype, [max(0, last - first), *shape[1:]])[(slice(None),) + slices[1:]]  # noqa: RUF005

    @staticmethod
    def _tensor(data: bytes, dtype: torch.dtype, shape: list[int]) -> Tensor:
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
