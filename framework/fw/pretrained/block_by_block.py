"""A model of a directory that computes with one block's weights in memory at a time.

What is outside of blocks is there from the start. Every row passes a block before the next one comes, so that each weight is read once
however many rows there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fw.checkpointing.tensor_files import Filling
from fw.kinds.model import CausalLM, Readout


class BlockByBlock:
    """Runs a model, built on the meta device in the dtype it computes in, whose blocks take hidden states first and return them first.

    Args:
        filling: of the model's tensors.
        device: that it computes on.
    """

    def __init__(self, model: CausalLM, filling: Filling, device: torch.device) -> None:
        self.model, self._filling, self._device = model.eval(), filling, device
        self._names = {id(module): name for name, module in model.named_modules()}
        inside = {id(module) for block in model.blocks for module in block.modules()}
        self._outside = [module for module in model.modules() if id(module) not in inside]
        for module in self._outside:
            module.to_empty(device=device, recurse=False)
        within = tuple(f"{self._names[id(block)]}." for block in model.blocks)
        filling({name: tensor for name, tensor in model.stored().items() if not name.startswith(within)})
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def outside(self) -> dict[str, Tensor]:
        """What is there all the time, by the model's names."""
        return {name: tensor for name, tensor in self.model.stored().items() if not tensor.is_meta}

    @torch.no_grad()
    def embedded(self, ids_BL: Tensor) -> Tensor:
        """Hidden states ``[B, L, D]`` before the first block. Of the same length every time."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        first: list[Tensor] = []

        def seen(x_BLD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            first.append(x_BLD)
            calls.append((args, kwargs))
            return x_BLD

        with self._blocks_are(seen):
            self.model(ids_BL.to(self._device), readout=_as_it_is)
        self._calls = calls
        return first[0]

    @contextmanager
    def block(self, number: int) -> Iterator[nn.Module]:
        """Within it the block has its weights."""
        block = self.model.blocks[number]
        block.to_empty(device=self._device)
        try:
            self._filling({name: tensor for name, tensor in self.model.stored().items() if self.owns(block, name)})
            yield block
        finally:
            block.to("meta")

    def name(self, block: nn.Module) -> str:
        """Of a block, in the model."""
        return self._names[id(block)]

    def owns(self, block: nn.Module, name: str) -> bool:
        """Whether a tensor, by the model's name, is one of a block's."""
        return name.startswith(f"{self.name(block)}.")

    @torch.no_grad()
    def through(self, number: int, x_BLD: Tensor) -> Tensor:
        """Hidden states behind the block, which has its weights."""
        args, kwargs = self._calls[number]
        out = self.model.blocks[number](x_BLD, *args, **kwargs)
        found: Tensor = out[0] if isinstance(out, tuple) else out
        return found

    @torch.no_grad()
    def read_out(self, ids_BL: Tensor, x_BLD: Tensor, readout: Readout) -> Tensor:
        """What ``readout`` makes of hidden states behind the last block."""
        with self._blocks_are(lambda *_, **__: x_BLD):
            found: Tensor = self.model(ids_BL.to(self._device), readout=readout)
        return found

    @contextmanager
    def _blocks_are(self, forward: Callable[..., Tensor]) -> Iterator[None]:
        blocks: Sequence[nn.Module] = self.model.blocks
        own: list[Mapping[str, Any]] = [vars(block) for block in blocks]
        before = [each.get("forward") for each in own]
        for block in blocks:
            block.forward = forward
        try:
            yield
        finally:
            for block, earlier in zip(blocks, before, strict=True):
                if earlier is None:
                    del block.forward
                else:
                    block.forward = earlier


def _as_it_is(x_BLD: Tensor, *_: Any) -> Tensor:
    return x_BLD
