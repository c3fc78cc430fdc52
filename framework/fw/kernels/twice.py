"""Gradients that can be differentiated again: by torch's operators, which alone know how."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def by_torch(compute: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
    """What ``grad`` of ``compute(*inputs)`` is of each input; None of those that need none. For a backward with ``create_graph=True``,
    where whatever is computed is part of the graph.

    Args:
        compute: in torch's operators and in fp32; its result is taken in the dtype of ``grad``.
    """
    with torch.autocast(grad.device.type, enabled=False):
        y = compute(*inputs).to(grad.dtype)
        found = iter(torch.autograd.grad(y, [x for x in inputs if x.requires_grad], grad, create_graph=True))
    return tuple(next(found) if x.requires_grad else None for x in inputs)
