"""Results that forward keeps for its repetition, operator by operator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from fw.api import RunError
from fw_plugins.activation.storages import overwritten, storages

Keep = Callable[[Any, int], bool]
"""Whether the result of an operator's (OpOverloadPacket's) n-th call, counted from 0, is kept. Asked of every call of a forward in turn."""

ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def keeping(decide: Callable[[], Keep]) -> Callable[[], ContextPair]:
    """What a forward and its repetition run under, so that the repetition gets what was kept and computes the rest.

    Unlike torch's own contexts these do not mind operators that come in one of the two only, as the gathers of an engine that prefetches.
    Where the forward is being compiled, torch's are what compilation understands.

    Args:
        decide: begins a forward.
    """

    def contexts() -> ContextPair:
        if torch.compiler.is_compiling():
            return create_selective_checkpoint_contexts(_Policy(decide))
        kept: dict[tuple[Any, int], _Kept] = {}
        return _Forward(decide(), kept), _Repetition(kept)

    return contexts


class _Kept:
    """A result, what it was computed from, in shape, and where the generators stood after it, if it drew from them."""

    def __init__(self, out: Any, args: Any, random: _Random | None) -> None:
        self._out = tree_map_only(Tensor, lambda tensor: tensor.detach(), out)  # else it would keep the graph
        self.storages = storages(out)
        self._shapes = _shapes(args)
        self._random = random

    def result(self, op: Any, args: Any) -> Any:
        if _shapes(args) != self._shapes:
            raise RunError(f"a block computes something else when it is repeated ({op}); it cannot be recomputed, use activation=none")
        if self._random is not None:
            self._random.restore()
        return self._out


class _Random:
    """The states of the generators that an operator with these arguments may draw from."""

    def __init__(self, args: Any) -> None:
        self._cpu = torch.get_rng_state()
        devices = {leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.is_cuda}
        self._cuda = {device: torch.cuda.get_rng_state(device) for device in devices}

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, _Random)
        return torch.equal(self._cpu, other._cpu) and all(torch.equal(state, other._cuda[d]) for d, state in self._cuda.items())

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)


def _shapes(args: Any) -> list[Any]:
    return [tuple(tensor.shape) for tensor in tree_leaves(args) if isinstance(tensor, Tensor)]


class _Forward(TorchDispatchMode):
    def __init__(self, keep: Keep, kept: dict[tuple[Any, int], _Kept]) -> None:
        super().__init__()
        self._keep, self._kept = keep, kept
        self._calls: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = op.overloadpacket
        number = self._calls[packet]
        self._calls[packet] += 1
        kwargs = kwargs or {}
        keep = self._keep(packet, number)
        if op._schema.is_mutable:  # what overwrites its input has to be done again, from what was there before
            lost = overwritten(op, args, kwargs)  # versions do not tell: views that autograd does not know of have their own
            for key in [key for key, kept in self._kept.items() if kept.storages & lost]:
                del self._kept[key]
            return op(*args, **kwargs)
        if not keep:
            return op(*args, **kwargs)
        if op.namespace == "aten" and torch.Tag.nondeterministic_seeded not in op.tags:  # other libraries' need not say so
            out, random = op(*args, **kwargs), None
        else:
            before = _Random((args, kwargs))
            out = op(*args, **kwargs)
            random = _Random((args, kwargs))
            random = None if random == before else random  # dropout of probability 0
        self._kept[packet, number] = _Kept(out, args, random)
        return out


class _Repetition(TorchDispatchMode):
    def __init__(self, kept: dict[tuple[Any, int], _Kept]) -> None:
        super().__init__()
        self._kept = kept
        self._calls: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = op.overloadpacket
        number = self._calls[packet]
        self._calls[packet] += 1
        kept = self._kept.pop((packet, number), None)
        return op(*args, **(kwargs or {})) if kept is None else kept.result(packet, args)


class _Policy:
    """The same for torch's contexts, which ask about the repetition too in some versions."""

    def __init__(self, decide: Callable[[], Keep]) -> None:
        self._keep = {False: decide(), True: decide()}
        self._calls: dict[tuple[Any, bool], int] = defaultdict(int)

    def __call__(self, context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        packet, again = op.overloadpacket, bool(context.is_recompute)
        number = self._calls[packet, again]
        self._calls[packet, again] += 1
        return CheckpointPolicy.MUST_SAVE if self._keep[again](packet, number) else CheckpointPolicy.PREFER_RECOMPUTE
