"""Whether DeepSpeed's operators can be compiled on this machine."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

HAS_COMPILER = shutil.which("g++") is not None


def has_libaio() -> bool:
    """Whether async_io can be compiled and has been, or may be."""
    if not HAS_COMPILER:
        return False
    with tempfile.TemporaryDirectory() as scratch:
        command = ["g++", "-x", "c++", "-", "-laio", "-o", f"{scratch}/out"]
        program = "#include <libaio.h>\nint main() { return 0; }\n"
        return subprocess.run(command, input=program, text=True, capture_output=True).returncode == 0
