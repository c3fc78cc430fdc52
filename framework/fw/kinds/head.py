"""What makes logits of hidden states, as an objective may have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Head = Callable[[Tensor], Tensor]
"""Maps hidden states ``[..., D]`` to logits ``[..., V]``. One that is a :class:`LinearHead` lets an objective do better than call it."""
_LOOKS = "only_looks"
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def only_looks(hook: _Hook) -> _Hook:
    """Mark a hook of a module that changes nothing: the model computes as it does without it, and need not call the module."""
    setattr(hook, _LOOKS, True)
    return hook


@dataclass(frozen=True)
class LinearHead:
    """``softcap · tanh(x Wᵀ / softcap)``; without softcap, ``x Wᵀ``. Holds the weight as it is during one forward."""

    weight_VD: Tensor
    softcap: float | None = None

    @staticmethod
    def of(module: nn.Module, softcap: float | None = None) -> LinearHead | None:
        """With the weight of a linear layer or embedding; None where something else sees to that when the module is called (an adapter, an
        engine that brings weights)."""
        if type(module) not in (nn.Linear, nn.Embedding) or getattr(module, "bias", None) is not None:
            return None
        hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
        if any(not getattr(hook, _LOOKS, False) for some in hooks for hook in some.values()):
            return None
        weight = module.weight
        assert isinstance(weight, Tensor)
        return LinearHead(weight, softcap)

    def __call__(self, x_D: Tensor) -> Tensor:
        """``[..., D]`` → ``[..., V]``."""
        return self.capped(F.linear(x_D, self.weight_VD))

    def capped(self, logits_V: Tensor) -> Tensor:
        """Of what the weight gives, the logits."""
        return logits_V if self.softcap is None else self.softcap * torch.tanh(logits_V / self.softcap)
