"""Steps in which some of a model's blocks stand for all: forward and backward leave out blocks that others are like, the update does not.

What a step with few blocks did becomes what one with all would do (:mod:`fw.planning.expand`). Nothing is assumed about blocks: whoever
uses this compares steps with different numbers of them, and steps with all are there where they do not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fw.assemble import Assembly
from fw.meter.account import Block, History, Recorder, Rules
from fw.meter.by_module import Places
from fw.planning.expand import Copies, NotRepeatable, Stretch, expand
from fw.planning.ledger import Ledger
from fw.planning.pattern import Pattern, pattern_of


class Repetition:
    """Leaves blocks of a model out. Used by one step after another."""

    def __init__(self, pattern: Pattern, made: Assembly, ledger: Ledger, steps_in_backward: bool) -> None:
        self.steps_in_backward = steps_in_backward
        """A first step then has to have all blocks: each makes its optimizer's state."""
        self._pattern, self._stepper, self._ledger = pattern, made.stepper, ledger
        self._blocks = list(made.model.blocks)
        self.module = made.stepper.module
        self.paths = Places(made.stepper, self._blocks).paths
        self._list = _list_of(made.model, self._blocks)
        self._host_before: int | None = None
        self._trained = [p for p in made.model.parameters() if p.requires_grad]

    @staticmethod
    def of(made: Assembly, ledger: Ledger, steps_in_backward: bool) -> Repetition | None:
        """None for a model of few blocks, or of too many kinds; where something waits for the gradients of all; where blocks have places in
        turn, for weights that come from elsewhere."""
        if isinstance(made.stepper.module, DistributedDataParallel) or made.model.elsewhere:
            return None
        pattern = pattern_of(made.model)
        return Repetition(pattern, made, ledger, steps_in_backward) if pattern is not None else None

    def recording(self, more: int) -> Callable[[torch.device, Rules], Any]:
        """What records a step in which as many periods run as are needed, and some more; its history is that of a step with all."""

        @contextmanager
        def recording(device: torch.device, rules: Rules) -> Iterator[Recorder]:
            with self._ledger.recording(device, rules) as found:
                step = _Step(found, self._pattern, self._pattern.least + more, self)
                try:
                    yield step
                finally:
                    step.close()

        return recording

    def run(self, blocks: Iterable[int]) -> None:
        """From here on the model has these blocks."""
        modules = [self._blocks[number] for number in blocks]
        self._list._modules = {str(number): module for number, module in enumerate(modules)}

    def leave_alone(self, blocks: Iterable[int]) -> AbstractContextManager[None]:
        """Within it nothing may use what these blocks have."""
        return self._ledger.leaving_alone(p for number in blocks for p in self._blocks[number].parameters())

    def saw_host(self, template: bool, count: int) -> None:
        """In forward the template begins, goes on, or has ended; ``count`` periods like it are missing, and with them what each keeps in
        host memory."""
        if (gpu := self._ledger.gpu) is None:
            return
        now = gpu.host_bytes
        if template and self._host_before is None:
            self._host_before = now
        elif not template and self._host_before is not None:
            gpu.left_out_bytes = max(gpu.left_out_bytes, (now - self._host_before) * count)
            self._host_before = None

    @property
    def left_out(self) -> int:
        """Blocks of the shortest step that are not run."""
        return self._pattern.period * (self._pattern.count - self._pattern.least)

    @property
    def blocks(self) -> list[nn.Module]:
        """All of them, in order."""
        return self._blocks

    @torch.no_grad()
    def give_gradients(self, template: list[nn.Module], left_out: list[list[nn.Module]], copies: Copies) -> set[Block]:
        """Blocks that were left out get gradients like the template's, in memory that has come; which is returned.

        Raises:
            NotRepeatable: gradients are not with the parameters.
        """
        if self.steps_in_backward:
            if any(p.grad is not None for p in self._trained):
                raise NotRepeatable("gradients are there that were to be gone")
            return set()
        kept = {block for block in map(self._ledger.block_of, self._stepper.kept().gradients) if block is not None}
        own = {block for p in self._trained if p.grad is not None and (block := self._ledger.block_of(p.grad)) is not None}
        if kept != own:
            raise NotRepeatable("gradients are not with the parameters")
        bound: set[Block] = set()
        models = dict(_named(template))
        for number, modules in enumerate(left_out):
            storages: dict[Block, Tensor] = {}
            for name, parameter in _named(modules):
                grad = models[name].grad
                if not parameter.requires_grad:
                    continue
                if grad is None or (like := self._ledger.block_of(grad)) is None:
                    raise NotRepeatable("gradients are not with the parameters")
                block = copies.of(like)[number]
                bound.add(block)
                if parameter.grad is not None:
                    self._ledger.bind(parameter.grad, block)
                    continue
                if like not in storages:
                    storages[like] = self._ledger.stand_in(block)
                parameter.grad = _as(grad, storages[like])
        return bound


class _Step(Recorder):
    """Records a step of few blocks."""

    def __init__(self, found: Recorder, pattern: Pattern, count: int, owner: Repetition) -> None:
        self._found, self._pattern, self._owner = found, pattern, owner
        self._bound: set[Block] = set()
        self._segments: list[tuple[int, Stretch | None]] = [(0, None)]
        self._pass, self._ascending = -1, True
        behind = pattern.head + pattern.period * count
        gap = pattern.period * (pattern.count - count)
        total = len(owner.blocks)
        self._run = [*range(behind), *range(behind + gap, total)]
        self._gap = range(behind, behind + gap)
        self._copies = Copies(pattern.count - count, self._paths())
        instances = {owner.paths[n]: (n - pattern.head) // pattern.period for n in self._run}
        self._instances = {path: n if 0 <= n < count else None for path, n in instances.items()}
        self._handle = owner.module.register_forward_pre_hook(self._shorten)
        self._history: History | None = None
        self._alone: AbstractContextManager[None] | None = None

    def _shorten(self, module: nn.Module, args: Any) -> None:
        """The model's forward begins, and what wraps it has seen all blocks."""
        self._owner.run(self._run)
        self._alone = self._owner.leave_alone(self._gap)
        self._alone.__enter__()

    def _segment(self, stretch: Stretch | None) -> None:
        if self._ascending:
            self._owner.saw_host(stretch is not None and stretch.instance == self._pattern.reach, self._copies.count)
        self._segments.append((len(self._found.history.changes), stretch))

    def mark(self, name: str) -> None:
        """What follows is ``name``; those left out get their gradients when backward has ended."""
        self._found.mark(name)
        self._segment(None)
        if name in ("forward", "backward"):
            self._pass, self._ascending = self._pass + 1, name == "forward"
        else:
            self._whole()
            self._bound |= self._owner.give_gradients(self._template, self._left_out, self._copies)

    @property
    def _template(self) -> list[nn.Module]:
        start = self._pattern.head + self._pattern.period * self._pattern.reach
        return self._owner.blocks[start : start + self._pattern.period]

    @property
    def _left_out(self) -> list[list[nn.Module]]:
        period = self._pattern.period
        return [self._owner.blocks[start : start + period] for start in self._gap[::period]]

    def _paths(self) -> list[dict[str, str]]:
        """For each period left out, as if those that were left out came behind the template, its modules by the template's."""
        period = self._pattern.period
        end = self._pattern.head + period * (self._pattern.reach + 1)
        order = [*self._run[:end], *self._gap, *self._run[end:]]
        near = range(end - period * (self._pattern.reach + 1), min(end + period * self._pattern.reach, len(self._run)))
        names = self._owner.paths
        return [
            {names[self._run[n]]: names[order[n + shift]] for n in near if n + shift < len(order)}
            for shift in range(period, len(self._gap) + 1, period)
        ]

    def close(self) -> None:
        """The model is whole again."""
        self._whole()
        self._handle.remove()

    def _whole(self) -> None:
        if self._alone is not None:
            self._alone.__exit__(None, None, None)
            self._alone = None
        self._owner.run(range(len(self._owner.blocks)))

    def enter(self, module: str) -> None:
        """Where one of the blocks begins, in forward or in backward, the one before ends."""
        self._found.enter(module)
        inside = module in self._instances and self._pass >= 0
        self._segment(Stretch(self._pass, self._ascending, self._instances[module]) if inside else None)

    def known(self, category: str, tensors: Iterable[Tensor]) -> None:
        self._found.known(category, tensors)

    def known_rest(self, category: str) -> None:
        self._found.known_rest(category)

    def name(self, category: str, tensors: Iterable[Tensor]) -> None:
        self._found.name(category, tensors)

    def name_rest(self, category: str) -> None:
        self._found.name_rest(category)

    @property
    def history(self) -> History:
        """Of a step with all blocks."""
        if self._history is None:
            self._copies.agree()
            self._history = expand(self._found.history, self._segments, self._pattern.reach, self._copies, self._bound)
        return self._history


def _list_of(model: nn.Module, blocks: list[nn.Module]) -> nn.ModuleList:
    """What holds them."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and list(module) == blocks:
            return module
    raise NotRepeatable("the model's blocks are in no list")


def _named(modules: Iterable[nn.Module]) -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            yield (number, name), parameter


def _as(grad: Tensor, storage: Tensor) -> Tensor:
    """A gradient of that shape in another storage."""
    plain = grad._local_tensor if isinstance(grad, DTensor) else grad
    view = storage.view(plain.dtype).as_strided(plain.shape, plain.stride(), plain.storage_offset())
    return DTensor(view, grad._spec, requires_grad=False) if isinstance(grad, DTensor) else view
