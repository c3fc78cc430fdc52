"""safetensors files written one tensor at a time, hashed while they are written.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, then the tensors back to back).
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fw.checkpointing.manifest import Digest
from fw.errors import RunError
from fw.place import Place, place


class Sized(Protocol):
    """What is announced of a tensor: shape and dtype."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> torch.dtype: ...


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BLOCK = 1 << 24


def size_bytes(tensor: Sized) -> int:
    """Bytes of the whole tensor, also where only a shard is here."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


class SafetensorsWriter:
    """Writes the announced tensors in the announced order. A block is hashed while it is written.

    Args:
        directory: of the file.
        tensors: names, shapes and dtypes; the values are given to :meth:`write`.
        wrote: hears of the bytes of each block.

    Raises:
        OSError: from here and all methods: it cannot be written.
    """

    def __init__(
        self, directory: Place | Path, name: str, tensors: Mapping[str, Sized], wrote: Callable[[int], object] = lambda count: None
    ) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for key, tensor in tensors.items():
            end = offset + size_bytes(tensor)
            header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._awaited = [(key, torch.Size(tensor.shape), tensor.dtype) for key, tensor in reversed(list(tensors.items()))]
        self._hash, self._size, self._wrote = hashlib.sha256(), 0, wrote
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._place = place(directory)
        self._file = self._place.create(name)
        self._put(struct.pack("<Q", len(text)) + text)

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _BLOCK):
            block = view[start : start + _BLOCK]
            hashed = self._hasher.submit(self._hash.update, block)
            try:
                left = block
                while left:
                    left = left[self._file.write(left) :]
            finally:
                hashed.result()
            self._size += len(block)
            self._wrote(len(block))

    def write(self, tensor: Tensor) -> None:
        """Append the next tensor, whole.

        Raises:
            RunError: it is not what was announced, and would make the file unreadable.
        """
        key, shape, dtype = self._awaited.pop()
        if (tensor.numel(), tensor.dtype) != (shape.numel(), dtype):
            raise RunError(f"'{key}' was to be {dtype} of {shape.numel():,} elements, and is {tensor.dtype} of {tensor.numel():,}")
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        if flat.numel():
            self._put(flat.view(torch.uint8).numpy().data)

    def close(self) -> Digest:
        """Make the file durable.

        Raises:
            RunError: a tensor that was announced has not been written.
        """
        if self._awaited:
            raise RunError(f"'{self._awaited[-1][0]}' was announced and not written")
        self._hasher.shutdown()
        self._place.finish(self._file)
        return Digest(self._size, self._hash.hexdigest())

    def abort(self) -> None:
        """Give the file up."""
        self._hasher.shutdown()
        self._file.close()


def split(tensors: Mapping[str, Sized], stem: str, max_bytes: int) -> dict[str, list[str]]:
    """File names and the tensors in each, in order, none above ``max_bytes`` unless a single tensor is.

    One file is ``<stem>.safetensors``; several are ``<stem>-00001-of-0000N.safetensors``, as Hugging Face names them.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = size_bytes(tensor)
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {f"{stem}.safetensors": groups[0]}
    return {f"{stem}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def index(files: Mapping[str, Sequence[str]], tensors: Mapping[str, Sized]) -> dict[str, object]:
    """What goes into ``<stem>.safetensors.index.json``."""
    return {
        "metadata": {"total_size": sum(size_bytes(t) for t in tensors.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
