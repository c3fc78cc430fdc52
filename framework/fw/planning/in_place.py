"""Where autograd sums up gradients, and whether it takes new memory for that.

A tensor that several operations use gets the sum of their gradients. Autograd's engine adds to what came first, in place where nothing else
refers to it, but never under a dispatch mode or on a tensor subclass (``InputBuffer::accumulate`` and ``can_accumulate_inplace`` of
torch/csrc/autograd/input_buffer.cpp): there a sum takes memory that training does not.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import graph
from torch.utils._python_dispatch import TorchDispatchMode

from fw.planning.leaves import tensors

_ENGINE = graph._engine_run_backward.__code__
_TORCH = Path(torch.__file__).parent
_PASSED = (str(Path(__file__).parent), str(_TORCH / "_compile.py"), str(_TORCH / "_dynamo"))
"""Where what wraps a dispatch mode is written."""
_add = torch.ops.aten.add


class Sums:
    """Knows which tensors lie in which memory, and by that what the engine would add in place."""

    def __init__(self) -> None:
        self._tensors: Counter[int] = Counter()
        """By the address of a storage object, how many tensors lie in it."""
        self._known: set[int] = set()

    def saw(self, tensor: Tensor) -> None:
        """An operator has made it."""
        if id(tensor) in self._known:
            return
        self._known.add(id(tensor))
        key = tensor.untyped_storage()._cdata
        self._tensors[key] += 1
        weakref.finalize(tensor, self._went, id(tensor), key).atexit = False

    def _went(self, tensor: int, key: int) -> None:
        self._known.discard(tensor)
        self._tensors[key] -= 1
        if not self._tensors[key]:
            del self._tensors[key]

    def in_place(self, func: Any, args: Any) -> Tensor | None:
        """What the engine would add to; None where it would not, or where it is not the engine that asks."""
        if func is not _add.Tensor or torch.is_grad_enabled() or not _engine_asks() or len(args) != 2:
            return None
        first: Tensor = args[0]  # what came before; the engine asks nothing of what is added to it
        return first if self._is_nobody_elses(first) else None

    def _is_nobody_elses(self, tensor: Any) -> bool:
        if not isinstance(tensor, FakeTensor) or tensor._use_count() > references():  # type: ignore[attr-defined]
            return False
        if tensor._is_view():  # which keeps the tensor it is a view of, and so its memory has two
            return False
        return self._tensors[tensor.untyped_storage()._cdata] == 1 and _is_dense(tensor)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, each in its own place."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _engine_asks() -> bool:
    """Whether the engine called the operator itself: no Python is between them but what wraps a dispatch mode."""
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code is _ENGINE


@functools.cache
def references() -> int:
    """How many references there are to a tensor that only the engine holds, when a dispatch mode looks at it."""
    probe = _Probe()
    with FakeTensorMode(), probe:
        x = torch.empty(2, requires_grad=True) * 2
        (x * 3 + x * 4).sum().backward()
    assert probe.found, "the engine has summed up a gradient"
    return min(probe.found)


class _Probe(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _add.Tensor and torch._C._current_graph_task_id() != -1:
            self.found += [tensor._use_count() for tensor in tensors(args)]  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))
