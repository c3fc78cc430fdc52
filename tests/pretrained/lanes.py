"""A stand-in for a GPU whose memory is the CPU's, lanes that copy as late as a stream may, and models to bring weights of."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import fw
from fw.kernels.copies import Copy, Lane
from fw.kinds.offload import OffloadPolicy
from fw.planned import PlannedGPU, planning_for
from fw.pretrained.load import structure
from models.architectures import CASES, VOCABULARY

CPU = torch.device("cpu")
ON_HOST, IN_FILES = OffloadPolicy(params="cpu"), OffloadPolicy(params="nvme")


@contextmanager
def as_on_a_gpu():
    with planning_for(PlannedGPU("stand-in", (9, 0), lambda tensor: tensor.device.type == "meta")):
        yield


class Late(Lane):
    """Copies nothing before somebody waits for it, then in the order of the lane. Its source is as it was asked for, or a test fails."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.queue: list[tuple[LateCopy, Tensor, Tensor]] = []
        self.lock = threading.Lock()

    def now(self):
        return object(), None

    def copy(self, target: Tensor, source: Tensor, after=None) -> Copy:
        with self.lock:
            copy = LateCopy(self)
            self.queue.append((copy, target, source))
            return copy


class LateCopy(Copy):
    def __init__(self, lane: Late) -> None:
        self.lane, self.is_done = lane, False

    def wait(self) -> None:
        with self.lane.lock:
            while not self.is_done:
                copy, target, source = self.lane.queue.pop(0)
                target.copy_(source)
                copy.is_done = True

    def done(self) -> None:
        self.wait()


def loaded(place: Path, policy: OffloadPolicy | None = None, **options):
    with as_on_a_gpu():
        return fw.load_model(place, offload=policy, **options)


def logits(model) -> Tensor:
    """Of three prompts, one after another: what is left of one must not disturb the next."""
    with torch.no_grad():
        return torch.stack([model(torch.arange(at, at + 12)[None] % VOCABULARY) for at in (0, 5, 9)])


def made(place: Path, layers: int, dtype: torch.dtype = torch.float32) -> Path:
    """A Llama of so many blocks, all of whose matrices differ."""
    torch.manual_seed(layers)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CASES["llama"], "num_hidden_layers": layers})).to(dtype).save_pretrained(
        place
    )
    return place


def size(place: Path, blocks: int) -> int:
    """Bytes of the matrices of so many blocks."""
    model, *_ = structure(place, torch.float32)
    return blocks * sum(p.numel() * p.element_size() for p in model.blocks[0].parameters() if p.dim() > 1)
