"""torchao's float8 linear layer (https://github.com/pytorch/ao), put in the place of a plain one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn


@contextmanager
def _quiet() -> Iterator[None]:
    """torchao tells of kernels for GPUs that it cannot load, and of what it registers; kernels that are needed and missing raise."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


with _quiet():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear


class AutocastFloat8Linear(Float8Linear):  # type: ignore[misc]
    """Under autocast its input has the device's autocast dtype, and so have output and what backward keeps.

    torchao itself asks for the GPU's autocast alone. On the CPU it would scale and keep the input in fp32.
    """

    def forward(self, input: Tensor) -> Tensor:
        """``[…, in]`` → ``[…, out]``."""
        device = input.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(input)
        input = input.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return super().forward(input)


def recipe_config(recipe: str, emulate: bool) -> Float8LinearConfig:
    """torchao's own, of that name."""
    return replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)


def to_float8(linear: nn.Linear, config: Float8LinearConfig) -> None:
    """Have a plain linear layer compute in float8. It stays the same object with the same parameters and hooks."""
    made = convert_to_float8_training(linear, config=config)
    for name, value in vars(made).items():
        if name not in vars(linear):
            setattr(linear, name, value)
    linear.__class__ = AutocastFloat8Linear
