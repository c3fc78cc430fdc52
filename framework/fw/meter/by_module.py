"""Which module of a model memory is for: its blocks one by one, what is before them and what comes after."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fw.kinds.sharding import KeptTensors, Stepper
from fw.meter.account import Recorder

EMBEDDING, HEAD, ELSEWHERE = "embedding", "head", "other"
"""Before the first block; final norm, head and loss; what no module of its own has."""


class Places:
    """Tells a recorder which module a step is in.

    In forward a module is told when it begins. In backward, a block begins when the gradient of its output is there, which is also the
    end of the block behind it.
    """

    def __init__(self, stepper: Stepper, blocks: Sequence[nn.Module]) -> None:
        # The names of modules are those of the model, not of what sharding wraps around it.
        self._modules = {name.removeprefix("module.").removeprefix("_orig_mod."): m for name, m in stepper.module.named_modules()}
        known = {id(module): name for name, module in self._modules.items()}
        self._stepper, self._blocks = stepper, blocks
        self.paths = [known.get(id(block)) or f"block {number}" for number, block in enumerate(blocks)]

    def follow(self, found: Recorder, in_forward: Callable[[], bool]) -> list[RemovableHandle]:
        """From now on, until the handles are removed. ``in_forward``: and not in a repetition for backward."""

        def before(module: nn.Module, args: Any) -> None:
            found.enter(names[id(module)])
            if in_forward() and module is self._blocks[0]:
                in_backward(args, EMBEDDING)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if in_forward():
                in_backward(output, names[id(module)])
                if module is self._blocks[-1]:
                    found.enter(HEAD)

        def in_backward(values: Any, name: str) -> None:
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                    value.register_hook(lambda grad: found.enter(name))
                    return

        names = {id(block): path for block, path in zip(self._blocks, self.paths, strict=True)}
        # In a compiled block they would be traced, and told out of order.
        first, last = torch.compiler.disable(before), torch.compiler.disable(after)
        handles = [block.register_forward_pre_hook(first, prepend=True) for block in self._blocks]  # before others gather its weights
        return handles + [block.register_forward_hook(last) for block in self._blocks]

    def of_parameters(self) -> dict[str, KeptTensors]:
        """What there is now of each module's parameters, in the order of forward."""
        kept: dict[str, KeptTensors] = {name: KeptTensors([], [], []) for name in (EMBEDDING, *self.paths, HEAD)}
        for name, own in self._stepper.kept_by_parameter().items():
            module = kept[self._module(name)]
            module.weights.extend(own.weights)
            module.gradients.extend(own.gradients)
            module.optimizer.extend(own.optimizer)
        return kept

    def _module(self, parameter: str) -> str:
        for path in self.paths:
            if parameter.startswith(f"{path}."):
                return path
        owner = self._modules.get(parameter.rpartition(".")[0])
        return EMBEDDING if isinstance(owner, nn.Embedding) else HEAD


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Of them all."""
    return sum(tensor.nbytes for tensor in tensors)
