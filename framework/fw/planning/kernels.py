"""What the CPU's kernels take for themselves while they run, which no dispatch mode sees.

- Element-wise operators compute in one dtype: an argument of another is copied into it, and a result that is to have another is computed
  beside its place (``TensorIteratorBase::compute_types`` of aten/src/ATen/TensorIterator.cpp). GPUs convert as they read.
- Reductions whose result has another dtype convert all of what they reduce first; of 16-bit floating-point numbers the mean is one of fp32
  (``make_reduction`` and ``mean`` of aten/src/ATen/native/ReduceOps.cpp). ``logsumexp`` keeps the exponentials, ``any`` and ``all`` what is
  not zero.
- Indexing takes its indices as int64 (``expandTensors`` and ``make_info`` of aten/src/ATen/native/IndexingUtils.h and
  TensorAdvancedIndexing.cpp).
- Concatenation into another dtype computes one tensor after another beside its place (``cat_out_cpu`` of TensorShape.cpp); FSDP's, of
  gradients that are cut into one chunk per rank, copies those whose rows do not divide first, with zeros behind (``_pad_chunk``).
- Products of 16 bits lay out their operands anew (:mod:`fw.planning.products`).
- bitsandbytes' 4-bit quantization is written in operators, on values in fp32 (``quantize_4bit`` of bitsandbytes/backends/default/ops.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fw.planning.leaves import tensors
from fw.planning.products import PRODUCTS, packed

_COMPARING = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"}
_PROMOTING = {
    *("add", "sub", "mul", "div", "maximum", "minimum", "remainder", "fmod", "pow", "atan2", "addcmul", "addcdiv"),
    *_COMPARING,
}
_INDEXING = {"index", "index_put", "_unsafe_index", "_unsafe_index_put"}
_CHUNKS = {"chunk_cat", "_chunk_cat"}
_REDUCING = {"sum", "nansum", "prod", "mean", "cumsum", "cumprod", "linalg_vector_norm", "norm"}


def momentary(func: Any, args: Any, kwargs: Any, out: Any, threads: int) -> list[int]:
    """Bytes of each block that is there while the operator runs in so many threads, besides what it takes and gives."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "bitsandbytes" and name == "quantize_4bit":
        return _four_bits(*args[:3])
    if namespace not in ("aten", "fsdp"):
        return []
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.rstrip("_") if in_place else name
    if name in PRODUCTS:
        return packed([value for value in args if isinstance(value, Tensor)], out.dtype, threads)
    if name in _PROMOTING:
        return _converted(name, args, kwargs, out)
    if name in _REDUCING or name in ("any", "all", "logsumexp"):
        return _reduced(name, args[0], out)
    if name in _INDEXING:
        return [8 * index.numel() for index in args[1] if isinstance(index, Tensor) and index.dtype == torch.int32]
    if name in _CHUNKS:
        return _chunks(*_bound(func, args, kwargs))
    if name == "cat":
        return _beside([(tensor.nbytes, tensor.dtype) for tensor in args[0]], out.dtype)
    return []


def _bound(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], int, int, Tensor | None]:
    """Tensors, dimension, number of chunks and ``out`` of FSDP's concatenation."""
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    return given["tensors"], given["dim"], given["num_chunks"], given.get("out")


def _chunks(tensors: list[Tensor], dim: int, number: int, out: Tensor | None) -> list[int]:
    padded, sizes = [], []
    for tensor in tensors:
        rows = tensor.shape[dim]
        whole = tensor.nbytes // max(rows, 1) * -(-rows // number) * number
        if rows % number:
            padded.append(whole)
        sizes.append((whole, tensor.dtype))
    return padded + (_beside(sizes, out.dtype) if out is not None else [])


def _four_bits(values: Tensor, block: int, quant_type: str) -> list[int]:
    count = values.numel()
    found = [4 * count] if values.dtype != torch.float32 else []
    if quant_type == "nf4":  # scaled, codes as int32 and as bytes, every other of these shifted
        return [*found, 4 * count, 4 * count, count, count // 2]
    return [*found, 4 * count, 4 * count, 8 * count, 8 * count]  # codes are sorted otherwise, and looked up by int64


def _beside(sizes: list[tuple[int, torch.dtype]], dtype: torch.dtype) -> list[int]:
    """The largest of those, by bytes and dtype, that are to have another dtype: one is there at a time."""
    return [max(others)] if (others := [nbytes for nbytes, own in sizes if own != dtype]) else []


def _reduced(name: str, source: Tensor, out: Tensor) -> list[int]:
    if name == "logsumexp":
        return [source.nbytes]
    if name in ("any", "all"):
        return [source.numel()] if source.dtype != torch.bool else []
    computed = torch.float32 if name == "mean" and source.dtype.itemsize == 2 and out.dtype == source.dtype else out.dtype
    return [source.numel() * computed.itemsize] if computed != source.dtype else []


def _converted(name: str, args: Any, kwargs: Any, out: Any) -> list[int]:
    given = tensors((args, kwargs))
    if not given or not isinstance(out, Tensor):
        return []
    common = given[0].dtype
    for tensor in given[1:]:
        common = torch.result_type(given[0], tensor) if tensor is given[1] else torch.promote_types(common, tensor.dtype)
    if name == "div" and not (common.is_floating_point or common.is_complex) and kwargs.get("rounding_mode") is None:
        common = torch.get_default_dtype()
    found = [tensor.numel() * common.itemsize for tensor in given if tensor.dtype != common and tensor.dim()]
    if out.dtype != common and name not in _COMPARING:
        found.append(out.numel() * common.itemsize)
    return found
