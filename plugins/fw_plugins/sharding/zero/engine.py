"""DeepSpeed itself: imported when the plugin is used, told where it runs, and kept from writing to the console."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def deepspeed(device_type: str) -> Any:
    """The package, set to compute on ``device_type``.

    On the CPU it has to be told so, or it takes a GPU it finds. It prints while it is imported, and warns of what fw has decided.
    """
    os.environ.setdefault("LOCAL_RANK", "0")
    if device_type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    find_ninja()
    with silent(), warnings.catch_warnings(), _hidden("mlflow"):  # its autotuner, which fw has no use for, would take seconds to import it
        warnings.simplefilter("ignore")
        package = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # torch 2.13 has renamed the collectives that DeepSpeed calls.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\..*` is deprecated", category=FutureWarning)
    warnings.filterwarnings("ignore", module=r"deepspeed\.")
    return package


@contextlib.contextmanager
def _hidden(name: str) -> Iterator[None]:
    """Inside, ``import name`` fails as where it is not installed; unless it is imported already."""
    if name in sys.modules:
        yield
        return
    modules: dict[str, Any] = sys.modules
    modules[name] = None  # what Python's own import statement takes for "not there"
    try:
        yield
    finally:
        del modules[name]


def join(package: Any) -> None:
    """Let DeepSpeed use the process group that exists. Without one that it knows, it takes each rank for the only one."""
    # It would compile collectives in shared memory, in silence, that only its inference uses.
    package.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    forget()
    package.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)


def forget() -> None:
    """Let DeepSpeed know of no process group, and number parameters and modules from 0: an earlier run in this process is over.

    Ranks compare those numbers, and only the first has planned in between.
    """
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    as_torch_multiplies()
    groups._release_process_group_references()
    comm.cdb = None
    Init.param_id = 0
    for count in DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ or ():
        count[0] = 0


def by_parameter(init: Any) -> None:
    """From now on products keep their parameter for backward, and not the memory that it has in forward: that would stay until then, so
    that stage 3 had all weights at once.

    Args:
        init: DeepSpeed's, which replaces torch's function where it surrounds a model's code; fw makes parameters one by one.
    """
    if init.mem_efficient_linear:
        init._enable_mem_efficient_linear()


def as_torch_multiplies() -> None:
    """The end of :func:`by_parameter`."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    if (torchs := getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)) is not None:
        torch.nn.functional.linear = torchs


def silent() -> contextlib.AbstractContextManager[object]:
    """Around what prints its progress."""
    return contextlib.redirect_stdout(io.StringIO())


def find_ninja() -> None:
    """The ninja that pip has installed may not be on the path of a Python that was called by its own."""
    if shutil.which("ninja") is None:
        with contextlib.suppress(ImportError):
            path = Path(importlib.import_module("ninja").BIN_DIR)
            os.environ["PATH"] = f"{path}{os.pathsep}{os.environ.get('PATH', '')}"
