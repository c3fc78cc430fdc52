"""How a module, or several in a row, forget what they computed and compute it again when backward asks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from fw.api import RunError, repeating

_autograd = torch._C._autograd

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Makes what forward and its repetition run under."""


def recompute(module: nn.Module, contexts: Contexts | None = None) -> None:
    """Have a module recompute what it is called for; see :func:`recomputing`."""
    module.forward = recomputing(module, module.forward, contexts)


def recomputing(module: nn.Module, forward: Callable[..., Any], contexts: Contexts | None = None) -> Callable[..., Any]:
    """``forward`` of which only the inputs stay until backward (Chen et al. 2016, https://arxiv.org/abs/1604.06174).

    The repetition has the random numbers, autocast and saved-tensor hooks of the first time, and ends with the last tensor backward needs.

    Args:
        contexts: what decides which results are kept all the same.
    """
    more: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}  # torch.compile takes no default for one

    def with_repetition(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return torch_checkpoint.checkpoint(_as_now(module, forward), *args, use_reentrant=False, **more, **kwargs)

    return with_repetition


def _as_now(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with the parameters that ``module`` has now: what divides layers puts each rank's parts in their places for the time of
    a block's forward, which is over when a module inside it is repeated."""
    parts = [(m, dict(m._parameters)) for m in module.modules() if any(type(p) is Tensor for p in m._parameters.values())]
    if not parts:
        return forward

    def forward_as_now(*args: Any, **kwargs: Any) -> Any:
        others = [(m, m._parameters) for m, _ in parts]
        try:
            for m, own in parts:
                m._parameters = own
            return forward(*args, **kwargs)
        finally:
            for m, other in others:
                m._parameters = other

    return forward_as_now


def recompute_together(blocks: Sequence[nn.Module]) -> None:
    """Keep only the first block's inputs of several that a model calls one after another, each with the result of the one before.

    Raises:
        RunError: in forward, where the model calls them otherwise.
    """
    if len(blocks) == 1:
        recompute(blocks[0])
        return
    segment = _Segment(blocks)
    for number, block in enumerate(blocks):
        block.forward = segment.watched(number, block.forward)


class _Segment:
    """The region begins in the first block's forward and ends with the last one's, so that whatever walks the blocks need not know.

    Between blocks it takes its saved-tensor hooks off the stack: others set theirs around each block, and the last set goes first.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._region: Generator[None, None, None] | None = None
        self._calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._last: Tensor | None = None
        self._hooks: tuple[Any, Any] | None = None
        self._repeating = False

    def watched(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        enter, leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)

        def watching(*args: Any, **kwargs: Any) -> Any:
            if self._repeating or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            try:
                enter(number, args, kwargs)
                out = forward(*args, **kwargs)
            except BaseException:
                self._abandon()
                raise
            leave(number, out)
            return out

        # Only what is around the forward stays out of compilation.
        watched: Callable[..., Any] = torch.compiler.disable(watching, recursive=False)
        return watched

    def _enter(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x, *rest = args
        self._resume()
        if number == 0:
            self._abandon()  # of a forward that was broken off between two blocks
            self._calls = calls = [(tuple(rest), kwargs)]
            self._region = torch_checkpoint._checkpoint_without_reentrant_generator(
                lambda x: self._repeat(x, calls), True, torch_checkpoint.noop_context_fn, "default", False, True, x
            )
            next(self._region)
            return
        if len(self._calls) != number or self._last is None or x.data_ptr() != self._last.data_ptr() or x.shape != self._last.shape:
            raise RunError(f"this model does more between its blocks than pass a result on (before block {number} of a segment); use full")
        self._calls.append((tuple(rest), kwargs))

    def _leave(self, number: int, out: Any) -> None:
        self._last = out[0] if isinstance(out, tuple) else out
        if number == len(self._blocks) - 1:
            assert self._region is not None
            region, self._region, self._last, self._calls = self._region, None, None, []
            for _ in region:
                raise AssertionError("a region ends once")
        else:
            self._hooks = _autograd._top_saved_tensors_default_hooks(True)
            _autograd._pop_saved_tensors_default_hooks()

    def _resume(self) -> None:
        if self._hooks is not None:
            _autograd._push_saved_tensors_default_hooks(*self._hooks)
            self._hooks = None

    def _abandon(self) -> None:
        region, self._region, self._last, self._calls = self._region, None, None, []
        if region is not None:
            region.close()

    def _repeat(self, x: Any, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        self._repeating = True
        try:
            with repeating():
                for block, (rest, kwargs) in zip(self._blocks, calls, strict=True):
                    out = block(x, *rest, **kwargs)
                    x = out[0] if isinstance(out, tuple) else out
        finally:
            self._repeating = False
