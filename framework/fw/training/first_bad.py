"""Where the first value that is not finite comes from, in a forward and backward that are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from fw.kinds.model import CausalLM, only_looks

Finding = tuple[int, bool, str]
"""Number of the micro-batch, whether it was in its backward, and what."""


class FirstBad:
    """Hooks on every module of ``model``; what they find first, in the order of computation, is :attr:`found`.

    Each look waits for the device: for a step that is known to go wrong, not for every one. Names are the model's own, which wrappers
    prefix (``prefix`` is cut off).
    """

    def __init__(self, model: nn.Module, prefixes: tuple[str, ...] = ("module.", "_orig_mod.")) -> None:
        self._model = model
        self._prefixes = prefixes
        self.found: Finding | None = None
        """What and when, comparable between ranks that compute the same."""
        self._micro_batch = 0
        self._of_leaves: list[RemovableHandle] = []
        """Hooks of gradients that no graph holds: without :meth:`rest` parameters would have them for ever."""

    def rest(self) -> None:
        """The backward that was watched is over."""
        for handle in self._of_leaves:
            handle.remove()
        self._of_leaves.clear()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Look at inputs, outputs and weights of modules; hooks wait for the backward that follows."""
        handles: list[RemovableHandle] = []
        inside: list[str] = []
        for raw, module in self._model.named_modules():
            name = raw
            for prefix in self._prefixes:
                name = name.replace(prefix, "")
            handles.append(module.register_forward_pre_hook(self._before(name, inside), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(name, inside), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def loss(self, loss: Tensor) -> None:
        """Look at the loss; its backward follows."""
        if not _finite(loss):
            self._note(f"the loss is {float(loss)}, of outputs that are finite")
        self._micro_batch += 1

    def _before(self, name: str, inside: list[str]) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.found:
                self._weights(name, module)
                if isinstance(module, CausalLM):  # its head may be a weight to the loss, and no layer that is called
                    for own, child in module.named_children():
                        if isinstance(child, nn.Linear):
                            self._weights(_join(name, own), child)
                given = _tensors((args, kwargs))
                if not all(map(_finite, given)):
                    self._note(f"what is computed in {inside[-1] if inside else 'the input'} is the first that is not finite")
                self._watch(given, f"the gradient that {name or 'the model'} gives to its input")
            inside.append(name or "the model")

        return only_looks(look)

    def _weights(self, name: str, module: nn.Module) -> None:
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            if not _finite(parameter):
                self._note(f"the weight {_join(name, own)} is not finite")
            self._watch([parameter], f"the gradient of the weight {_join(name, own)}")

    def _after(self, name: str, inside: list[str]) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            inside.pop()
            made = _tensors(output)
            if not self.found and not all(map(_finite, made)):
                self._note(f"the output of {name or 'the model'} is the first that is not finite")
            self._watch(made, f"the gradient that reaches the output of {name or 'the model'}")

        return only_looks(look)

    def _watch(self, tensors: list[Tensor], what: str) -> None:
        for tensor in tensors:
            if tensor.requires_grad and torch.is_grad_enabled():
                handle = tensor.register_hook(self._gradient(what))
                if tensor.is_leaf:
                    self._of_leaves.append(handle)

    def _gradient(self, what: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if not self.found and not _finite(gradient):
                self._note(f"{what} is the first that is not finite", backward=True)

        return look

    def _note(self, text: str, backward: bool = False) -> None:
        self.found = self.found or (self._micro_batch - backward, backward, text)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _finite(tensor: Tensor) -> bool:
    """Of what this rank has; nothing is communicated."""
    local = tensor.detach()
    local = local.to_local() if isinstance(local, DTensor) else local
    return bool(local.isfinite().all())


def _join(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own
