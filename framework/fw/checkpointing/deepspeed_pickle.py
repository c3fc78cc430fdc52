"""DeepSpeed's pickles, read without running anything they say: its few classes have harmless stand-ins, every other one is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar

import torch

from fw.errors import UserError


class FragmentAddress:
    """Stands for ``fragment_address``: where a parameter lies in a flat partition, in elements."""

    def __init__(self, numel: int = 0, start: int = 0) -> None:
        self.numel, self.start = numel, start


class ZeroStage(int):
    """Stands for ``ZeroStageEnum``, whose members have these names."""

    BY_NAME: ClassVar[Mapping[str, int]] = {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}


def member(of: type, name: str) -> ZeroStage:
    """Stands for ``getattr``, by which Python's enumerations were pickled from 3.11.0 on for a few releases (Debian 12's among them): of
    nothing but stages.

    Raises:
        UnpicklingError: it is asked for something else.
    """
    if of is not ZeroStage or name not in ZeroStage.BY_NAME:
        raise UnpicklingError(f"it asks for {name!r} of something, which could run code and is refused")
    return ZeroStage(ZeroStage.BY_NAME[name])


class Scaler:
    """Stands for the loss scalers; their attributes are their state."""


_STAND_INS: dict[str, Callable[..., Any]] = {
    "builtins.getattr": member,
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "deepspeed.runtime.zero.config.ZeroStageEnum": ZeroStage,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Scaler,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Scaler,
}


def load(path: Path) -> dict[str, Any]:
    """What a file of DeepSpeed's holds, tensors mapped from it and not read.

    Raises:
        UserError: it is missing, damaged, or asks for a class or function that is none of DeepSpeed's known ones.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing; copy the files of all ranks into one directory")
    try:
        asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if foreign := sorted(set(asked) - set(_STAND_INS)):
            raise UserError(f"{path} asks for {', '.join(foreign)}, which could run code and is refused; save the checkpoint without it")
        allowed = [(stand_in, name) for name, stand_in in _STAND_INS.items()]
        with torch.serialization.safe_globals(allowed):  # type: ignore[arg-type]
            loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UserError:
        raise
    except Exception as error:  # a damaged file fails anywhere in the reader
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"{path} is no whole file of DeepSpeed's ({type(error).__name__}: {first}); copy it again") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path} is no file of DeepSpeed's: it holds a {type(loaded).__name__}")
    return loaded
