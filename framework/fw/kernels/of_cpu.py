"""Which tensors operators of the CPU's kernels take."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from fw.kernels.build import NotCompiled, library
from fw.kernels.switches import KERNELS, TRAINING_KERNELS, turned_off
from fw.planned import planned_gpu

DTYPES = (torch.bfloat16, torch.float32)
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


def wanted() -> bool:
    """Whether training is to use these kernels: unless ``FW_TRAINING_KERNELS=off``, in the environment of a plan as in that of a run."""
    return not turned_off(TRAINING_KERNELS)


def missing() -> str | None:
    """Why these kernels do not train here although nobody turned them off, as a sentence."""
    if not wanted() or turned_off(KERNELS):
        return None
    try:
        library()
    except NotCompiled as why:
        return str(why)
    return None


def of_cpu(*tensors: Tensor) -> bool:
    """Whether these are plain numbers in a CPU's memory, or stand for such in a plan: no parts of a DTensor, and no memory that cannot be
    read at an address. Not within transforms of ``torch.func`` and forward-mode differentiation, which only torch's operators know."""
    return wanted() and planned_gpu() is None and not _transformed() and all(type(x) in _PLAIN and x.is_cpu for x in tensors)


def _transformed() -> bool:
    if torch.compiler.is_compiling():  # has transforms of its own, and cannot trace the question
        return False
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products in these 16 bits on this processor; elsewhere torch's are loops of several times the time of fp32's."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
