"""What there is to say when memory runs out: where it did, what has the memory, and which tensors are largest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fw.config import format_size
from fw.errors import RunError
from fw.meter.memory import malloc_in_use_bytes

if TYPE_CHECKING:
    from fw.training.module import TrainingModule

FILE = "out-of-memory.json"
"""In the run's directory: the report of the rank that ran out first."""
_LARGEST = 8
_LIBRARIES = ("/torch/", "/pytorch_lightning/", "/lightning_fabric/", "/deepspeed/")
_ASKED = re.compile(r"allocate ([\d.]+) ?(bytes|[KMGT]iB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemory(RunError):
    """A rank's memory was not enough; the sentence says where and for what, :data:`FILE` more."""


@dataclass(frozen=True)
class Large:
    """A tensor's memory; ``what``: a parameter's name, the variable that has it."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    what: str

    def __str__(self) -> str:
        return f"{format_size(self.nbytes)} {self.what} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Report:
    """What a rank had when its memory ran out.

    Attributes:
        phase: forward, backward or step; empty outside of a step.
        module: the innermost that Python was in; empty where that is none.
        line: the innermost of the program's own.
        asked_bytes: that were not to be had; 0 where nobody says.
        taken_bytes: by tensors of the run, as far as is known.
        parts: bytes of weights, gradients, optimizer state, buffers, and all else.
        largest: tensors that Python knows of.
    """

    rank: int
    step: int
    phase: str
    module: str
    line: str
    asked_bytes: int
    taken_bytes: int
    parts: dict[str, int]
    largest: list[Large]

    def sentence(self) -> str:
        """In a line."""
        where = " of ".join(filter(None, (self.phase, self.module))) or "training"
        parts = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in self.parts.items() if nbytes)
        asked = f"{format_size(self.asked_bytes)} more were not to be had" if self.asked_bytes else "no more was to be had"
        return f"out of memory in {where} (step {self.step}, {self.line}): {asked} beside {format_size(self.taken_bytes)}: {parts}"

    def lines(self) -> list[str]:
        """The largest tensors."""
        return ["the largest tensors:", *(f"  {large}" for large in self.largest)]

    def as_json(self) -> dict[str, Any]:
        """For :data:`FILE`."""
        names = ("rank", "step", "phase", "module", "line", "asked_bytes", "taken_bytes", "parts")
        largest = [{"bytes": each.nbytes, "shape": list(each.shape), "dtype": each.dtype, "what": each.what} for each in self.largest]
        return {name: getattr(self, name) for name in names} | {"largest": largest}

    def write(self, run_dir: Path) -> None:
        """The first rank's that comes; the others have what it has."""
        try:
            with (run_dir / FILE).open("x") as file:
                json.dump(self.as_json(), file, indent=1)
        except OSError:  # another was first, or there is no room: the sentence says what matters
            return


def written(run_dir: Path) -> dict[str, Any] | None:
    """The report of a run that has failed; None where its memory was not the reason."""
    try:
        found: dict[str, Any] = json.loads((run_dir / FILE).read_text())
    except (OSError, ValueError):
        return None
    return found


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator had nothing left, of the GPU or of the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # oneDNN, which has chosen a way to compute and finds no memory for its code: what it cannot compute it says in other words.
    return isinstance(error, RuntimeError) and ("DefaultCPUAllocator" in str(error) or str(error) == "could not create a primitive")


def report(error: BaseException, module: TrainingModule) -> Report:
    """What is there now, while the error still has the frames in which it was raised."""
    device = module.strategy.root_device
    stepper = module.assembly.stepper
    names = {id(each): name for name, each in stepper.module.named_modules()}
    frames = list(_frames(error))
    kept = stepper.kept()
    parts = {
        "weights": _bytes(kept.weights, device),
        "gradients": _bytes(kept.gradients, device),
        "optimizer state": _bytes(kept.optimizer, device),
        "buffers": _bytes(kept.buffers, device),
    }
    known = sum(parts.values())
    taken = torch.cuda.memory_allocated(device) if device.type == "cuda" else (malloc_in_use_bytes() or 0) - module.before_bytes
    parts["activations, results and all else"] = max(0, taken - known)
    return Report(
        rank=module.global_rank,
        step=module.global_step + 1,
        phase=_phase(frames),
        module=next((names[id(own)] for frame, _ in reversed(frames) if id(own := frame.f_locals.get("self")) in names), ""),
        line=next((_line(frame, number) for frame, number in reversed(frames) if not _foreign(frame)), ""),
        asked_bytes=_asked(error),
        taken_bytes=max(taken, known),
        parts=parts,
        largest=_largest(module, frames, device),
    )


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _phase(frames: list[tuple[FrameType, int]]) -> str:
    called = [frame.f_code.co_name for frame, _ in frames]
    if "forward_backward" in called:
        following = called[called.index("forward_backward") + 1 :]
        return "backward" if following[:1] == ["backward"] else "forward"
    return "step" if "_step" in called else "validation" if "validation_step" in called else ""


def _foreign(frame: FrameType) -> bool:
    return any(library in frame.f_code.co_filename for library in _LIBRARIES)


def _line(frame: FrameType, number: int) -> str:
    file = Path(frame.f_code.co_filename)
    return f"{'/'.join(file.parts[-3:])}:{number}"


def _asked(error: BaseException) -> int:
    found = _ASKED.search(str(error))
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _bytes(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Each memory once."""
    return sum({s.data_ptr(): s.nbytes() for s in (_local(t).untyped_storage() for t in tensors) if s.device.type == device.type}.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _largest(module: TrainingModule, frames: list[tuple[FrameType, int]], device: torch.device) -> list[Large]:
    """Of what the stepper keeps for each parameter, and what variables have where the error was raised."""
    found: dict[int, Large] = {}

    def add(tensor: Tensor, what: str) -> None:
        own = _local(tensor)
        storage = own.untyped_storage()
        if storage.nbytes() and storage.device.type == device.type:
            known = Large(storage.nbytes(), tuple(own.shape), str(own.dtype).removeprefix("torch."), what)
            found.setdefault(storage.data_ptr(), known)

    for name, kept in module.assembly.stepper.kept_by_parameter().items():
        for what, tensors in (("weight", kept.weights), ("gradient of", kept.gradients), ("optimizer state of", kept.optimizer)):
            for tensor in tensors:
                add(tensor, f"{what} {name}")
    for frame, _ in reversed(frames):
        for name, value in list(frame.f_locals.items()):
            for tensor in _tensors(value):
                add(tensor, f"'{name}' of {_function(frame)}")
    return sorted(found.values(), key=lambda each: -each.nbytes)[:_LARGEST]


def _function(frame: FrameType) -> str:
    owner = frame.f_locals.get("self")
    return frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"


def _tensors(value: Any) -> Iterator[Tensor]:
    """Itself, or those directly in a container."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set)):
        yield from (each for each in value if isinstance(each, Tensor))
    elif isinstance(value, dict) and not isinstance(value, nn.Module):
        yield from (each for each in value.values() if isinstance(each, Tensor))
