"""Compile DeepSpeed's operators, those that this machine can: python build_operators.py"""

from __future__ import annotations

import contextlib

from operators import HAS_COMPILER, has_libaio

from fw.errors import FwError
from fw_plugins.sharding.zero import ops

names = ["cpu_adam"] if HAS_COMPILER else []
names += ["pin_memory", "async_io"] if has_libaio() else []
with contextlib.suppress(FwError):  # the tests that need them will say so
    ops.prepare(names, lambda text: None, "cpu")
