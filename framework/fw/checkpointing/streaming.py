"""Weights of blocks that lie in host memory or in files, and are brought to a GPU while the block before computes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fw.checkpointing.pages import coming
from fw.checkpointing.unsaved import without_saving
from fw.kernels.copies import Copy, Lane, Moment, host_memory
from fw.kinds.model import CausalLM
from fw.planned import planned_gpu

PLACES = 2
"""On the GPU, each for one block's weights: of the one that computes, and of the next."""
_ALIGNED = 256
"""Bytes; what cuBLAS likes best."""


def room(tensors: Iterable[Tensor]) -> int:
    """Bytes that they take one after another."""
    return sum(_aligned(tensor) for tensor in tensors)


class Expected:
    """What modules of a model ask whose weights come from elsewhere, before there are any."""

    def __init__(self) -> None:
        self.storages: frozenset[int] = frozenset()
        self.brought: Brought | None = None

    def theirs(self, tensor: Tensor) -> bool:
        """Whether it lies where weights are brought to."""
        return _storage(tensor) in self.storages

    def computes(self, number: int) -> None:
        """A block is about to."""
        if self.brought is not None:
            self.brought.computes(number)


_expected: WeakKeyDictionary[nn.Module, Expected] = WeakKeyDictionary()


def expect(model: CausalLM) -> Expected:
    """Have each module that has such weights see to it that they are there. To be called once classes of modules are what they will be, and
    before anything repeats a module's forward: what is repeated must ask again."""
    expected = _expected[model] = Expected()
    for number, (block, those) in enumerate(_of_blocks(model)):
        own = {id(model.get_parameter(name)) for name in those}
        for module in block.modules():
            if any(id(parameter) in own for parameter in module._parameters.values()):
                module.forward = without_saving(module.forward, expected.theirs, partial(expected.computes, number))
    return expected


def _of_blocks(model: CausalLM) -> list[tuple[nn.Module, dict[str, Tensor]]]:
    """Blocks that have any, in order, and their own."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    found = []
    for block in model.blocks:
        those = {names[id(p)]: model.elsewhere[names[id(p)]] for p in block.parameters() if names[id(p)] in model.elsewhere}
        if those:
            found.append((block, those))
    return found


def stream(model: CausalLM, device: torch.device, lane: Lane | None = None) -> None:
    """Have each block find its weights of ``model.elsewhere`` on ``device`` when it computes.

    Where they lie there is another block's place when that one computes: every second one has the same. Nothing else must use them, and
    nothing of them may train; backward is brought them once more. A model that is recorded, as CUDA graphs are, would not see them come.

    Args:
        lane: of copies to the device.
    """
    if not model.elsewhere:
        return
    expected = _expected.get(model) or expect(model)
    of_block = _of_blocks(model)
    size = max(room(those.values()) for _, those in of_block)
    count = min(PLACES, len(of_block))
    places = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
    from_files = any(not _is_own(model, name) for _, those in of_block for name in those)
    staging = [host_memory([size], torch.uint8) if from_files else None for _ in range(count)]
    weights: list[list[_Weight]] = []
    for number, (block, those) in enumerate(of_block):
        begin, own = 0, []
        for name, source in those.items():
            place, staged = places[number % count], staging[number % count]
            through = staged if not _is_own(model, name) else None
            own.append(_Weight(source, _within(place, begin, source), None if through is None else _within(through, begin, source)))
            begin += _aligned(source)
        _put(block, {id(model.get_parameter(name)): weight.target for name, weight in zip(those, own, strict=True)})
        weights.append(own)
    lane = lane or Lane(device)
    for place in places:
        lane.keeps(place)
    expected.brought = brought = Brought(weights, count, lane)
    expected.storages = frozenset(_storage(place) for place in places)
    for number, (block, _) in enumerate(of_block):
        block.register_forward_pre_hook(_hook(brought.computes, number))
        block.register_forward_hook(_hook(brought.ended, number))


def _is_own(model: CausalLM, name: str) -> bool:
    """Whether it lies in memory of the process's own."""
    return name not in model.in_files


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


def _within(memory: Tensor, begin: int, like: Tensor) -> Tensor:
    """A tensor like another, at this place of memory."""
    return memory[begin : begin + like.numel() * like.element_size()].view(like.dtype).as_strided(like.shape, like.stride())


def _put(block: nn.Module, tensors: dict[int, Tensor]) -> None:
    """In the place of parameters, by their identity."""
    made: dict[int, nn.Parameter] = {}
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in tensors:
                key = id(parameter)
                made.setdefault(key, nn.Parameter(tensors[key], requires_grad=False))
                module._parameters[name] = made[key]


def _hook(do: Callable[[int], None], number: int) -> Callable[..., None]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hook(*_: Any) -> None:
        do(number)

    found: Callable[..., None] = hook
    return found


@dataclass(frozen=True)
class _Weight:
    """Where it lies, where it is used, and what it goes through between a file and there."""

    source: Tensor
    target: Tensor
    staged: Tensor | None


class _FromFiles(Copy):
    """A copy that begins when a thread has read the files."""

    def __init__(self, copy: Future[Copy]) -> None:
        self._copy = copy

    def wait(self) -> None:
        self._copy.result().wait()

    def done(self) -> None:
        self._copy.result().done()


class Brought:
    """Which block's weights each place holds, or will.

    Args:
        weights: of each block, in the order in which they compute.
        places: block ``n`` has place ``n % places``.
    """

    def __init__(self, weights: Sequence[Sequence[_Weight]], places: int, lane: Lane) -> None:
        self._weights, self._lane = weights, lane
        self._holds: list[int | None] = [None] * places
        self._copies: list[Copy | None] = [None] * places
        self._left_staging: list[Copy | None] = [None] * places
        self._thread: ThreadPoolExecutor | None = None

    def computes(self, number: int) -> None:
        """A block is about to, forward or backward: its weights are there, and those of the next are on their way."""
        place = self._bring(number)
        if (copy := self._copies[place]) is not None:
            copy.wait()
            self._copies[place] = None
        following = self._following(number)
        if following is not None and self._place(following) != place:
            self._bring(following)

    def ended(self, number: int) -> None:
        """A block's forward has, and its place is free. The first one's may be the same as the last one's."""
        following = self._following(number)
        if following is not None and self._place(following) == self._place(number):
            self._bring(following)

    def _following(self, number: int) -> int | None:
        """In a backward, the one before. A forward that none follows is followed by the next one."""
        if torch._C._current_graph_task_id() != -1:
            return number - 1 if number else None
        if number + 1 < len(self._weights):
            return number + 1
        return None if torch.is_grad_enabled() else 0

    def _place(self, number: int) -> int:
        return number % len(self._holds)

    def _bring(self, number: int) -> int:
        """Begin to, unless it is there or on its way; the place."""
        place = self._place(number)
        if self._holds[place] != number:
            if (before := self._copies[place]) is not None:  # nobody has waited for it; it may not even be on the lane yet
                before.wait()
            self._holds[place] = None
            self._copies[place] = self._begun(number, place)
            self._holds[place] = number
        return place

    def _begun(self, number: int, place: int) -> Copy:
        weights, now = self._weights[number], self._lane.now()
        if all(weight.staged is None for weight in weights):
            return self._copied(weights, now)
        if now is None or planned_gpu() is not None:  # nothing computes beside it
            return self._read(number, place, now)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "fw-weights")
        return _FromFiles(self._thread.submit(self._read, number, place, now))

    def _copied(self, weights: Sequence[_Weight], after: Moment | None) -> Copy:
        for weight in weights:
            copy = self._lane.copy(weight.target, weight.source if weight.staged is None else weight.staged, after)
        return copy

    @torch.inference_mode()
    def _read(self, number: int, place: int, after: Moment | None) -> Copy:
        """From files into page-locked memory, once nothing is copied from there any more, and on. What the next block wants is read
        meanwhile."""
        if (before := self._left_staging[place]) is not None:
            before.done()
        for weight in self._weights[number]:
            if weight.staged is not None:
                weight.staged.copy_(weight.source)
        self._left_staging[place] = copy = self._copied(self._weights[number], after)
        if planned_gpu() is None:
            for weight in self._weights[(number + 1) % len(self._weights)]:
                if weight.staged is not None:
                    coming(weight.source)
        return copy
