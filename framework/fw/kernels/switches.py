"""Variables of the environment by which kernels are left aside."""

from __future__ import annotations

import os

from fw.errors import UserError

KERNELS, TRAINING_KERNELS = "FW_KERNELS", "FW_TRAINING_KERNELS"
_OFF, _ON = ("off", "0", "false", "no"), ("", "on", "1", "true", "yes")


def turned_off(name: str) -> bool:
    """Whether the variable says so.

    Raises:
        UserError: it says neither yes nor no.
    """
    word = os.environ.get(name, "")
    if word.lower() in _OFF:
        return True
    if word.lower() in _ON:
        return False
    raise UserError(f"{name}={word}: this is neither on nor off")
