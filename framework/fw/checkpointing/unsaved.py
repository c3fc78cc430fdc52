"""Weights that autograd does not keep for backward, since their memory is another's by then: it asks for them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_autograd = torch._C._autograd


class _Asked:
    """In a saved tensor's place."""

    def __init__(self, take: Callable[[], Tensor]) -> None:
        self.take = take


def without_saving(forward: Callable[..., Any], theirs: Callable[[Tensor], bool], bring: Callable[[], None]) -> Callable[..., Any]:
    """A module's forward that computes with what ``bring`` sees to, and whose backward has it do so again.

    Hooks on saved tensors that are set around it, as a recomputation's or those of an offload of activations, get all else: torch asks
    the innermost alone.

    Args:
        theirs: whether a tensor lies in such memory.
    """

    bring = torch.compiler.disable(bring)

    def computing(*args: Any, **kwargs: Any) -> Any:
        bring()
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        others = _autograd._top_saved_tensors_default_hooks(True)

        def pack(tensor: Tensor) -> Tensor | _Asked:
            if theirs(tensor):
                there = tensor.detach()
                return _Asked(lambda: there)
            if others is None:
                return tensor if tensor.is_leaf else tensor.detach()  # an operation's own output would keep the operation
            packed = others[0](tensor)
            return _Asked(lambda: others[1](packed))

        def unpack(packed: Tensor | _Asked) -> Tensor:
            if not isinstance(packed, _Asked):
                return packed
            value = packed.take()
            if theirs(value):
                bring()
            return value

        with saved_tensors_hooks(torch.compiler.disable(pack), torch.compiler.disable(unpack)):
            return forward(*args, **kwargs)

    outside: Callable[..., Any] = torch.compiler.disable(computing, recursive=False)
    return outside
