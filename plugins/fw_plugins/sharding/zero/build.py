"""Compile one of DeepSpeed's operators: python -m fw_plugins.sharding.zero.build NAME DEVICE_TYPE"""

from __future__ import annotations

import sys

from fw_plugins.sharding.zero import engine

_BUILDERS = {"cpu_adam": "CPUAdamBuilder", "async_io": "AsyncIOBuilder"}


def main(name: str, device_type: str) -> None:
    """Compile and load it, in this process."""
    engine.deepspeed(device_type)
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.op_builder.pin_memory import PinMemoryBuilder

    builder = PinMemoryBuilder() if name == "pin_memory" else get_accelerator().create_op_builder(_BUILDERS[name])
    builder.load(verbose=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
