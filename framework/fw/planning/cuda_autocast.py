"""Autocast as a GPU has it: some operators are computed in float32 there that the CPU leaves in the lower dtype.

The lists are those of aten/src/ATen/autocast_mode.h; what both devices do alike (products in the lower dtype, most losses in float32) is
not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan", "softplus"),
    *("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "layer_norm", "native_layer_norm", "group_norm", "logsumexp"),
    *("cosine_similarity", "dist"),
)
_RESULT_IN_FLOAT32 = ("softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList")
"""Only where the caller names no dtype."""


@contextmanager
def autocast_as_on_gpu() -> Iterator[None]:
    """Within it, ``torch.autocast("cpu")`` converts what ``torch.autocast("cuda")`` would."""
    library = torch.library.Library("aten", "IMPL")
    for name in _FLOAT32:
        library.impl(name, _converting(_overload(name)), "AutocastCPU")
    for name in _RESULT_IN_FLOAT32:
        library.impl(name, _resulting(_overload(name)), "AutocastCPU")
    try:
        yield
    finally:
        library._destroy()


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _lower(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _converting(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            args, kwargs = tree_map(lambda value: value.float() if _lower(value) else value, (args, kwargs))
            return operator(*args, **kwargs)

    return kernel


def _resulting(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            names = [argument.name for argument in operator._schema.arguments]
            given = args[names.index("dtype")] if names.index("dtype") < len(args) else kwargs.get("dtype")
            if given is None and _lower(args[0]):
                return operator(*args[: names.index("dtype")], **{**kwargs, "dtype": torch.float32})
            return operator(*args, **kwargs)

    return kernel
