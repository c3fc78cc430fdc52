"""The random generators of a rank, taken along into its checkpoints."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fw.checkpointing.state import decode, encode


def seed_all(seed: int) -> None:
    """Seed the default generators of torch, numpy and Python."""
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state(device: torch.device) -> dict[str, Any]:
    """The states of the default generators of torch, numpy and Python, as JSON."""
    state_of_numpy = np.random.get_state(legacy=True)
    assert isinstance(state_of_numpy, tuple)
    name, keys, position, has_gauss, gauss = state_of_numpy
    version, numbers, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "cpu": _encoded(torch.get_rng_state()),
        "numpy": [name, encode(np.asarray(keys).tobytes()), int(position), int(has_gauss), float(gauss)],
        "python": [version, encode(np.array(numbers, dtype=np.uint32).tobytes()), next_gauss],
    }
    if device.type == "cuda":
        state["cuda"] = _encoded(torch.cuda.get_rng_state(device))
    return state


def restore_rng(state: Mapping[str, Any], device: torch.device) -> None:
    """Take back what :func:`rng_state` gave; a rank the checkpoint does not know keeps its own seed."""
    if "cpu" in state:
        torch.set_rng_state(_decoded(state["cpu"]))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(_decoded(state["cuda"]), device)
    if "numpy" in state:
        name, keys, *more = state["numpy"]
        np.random.set_state((name, np.frombuffer(decode(keys), dtype=np.uint32), *more))
    if "python" in state:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(np.frombuffer(decode(numbers), dtype=np.uint32).tolist()), gauss))


class GeneratorStates:
    """Of torch's generators now, on the host and on ``device``, to draw the same again: dropout of a step that is repeated."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Back to where they were."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)


def _encoded(state: Tensor) -> str:
    return encode(state.numpy().tobytes())


def _decoded(text: str) -> Tensor:
    return torch.frombuffer(bytearray(decode(text)), dtype=torch.uint8)
