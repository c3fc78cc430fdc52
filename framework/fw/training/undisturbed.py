"""What a run in somebody's own process changes of it for the time it takes."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fw.kernels.build import set_threads

_QUIETENED = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "torch.distributed.tensor._redistribute")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Afterwards random generators, torch's threads, filters of warnings and levels of loggers are what they were."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    threads, levels = torch.get_num_threads(), {name: logging.getLogger(name).level for name in _QUIETENED}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        if torch.get_num_threads() != threads:
            set_threads(threads)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
