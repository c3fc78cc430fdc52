"""Flags by which kernels are compiled as for processors that have less than this one, or tiles that it has not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from fw.kernels import matrix
from fw.kernels.build import NotCompiled, library
from fw.kernels.calls import Kernel

HAS_AVX = torch.backends.cpu.get_cpu_capability().startswith("AVX")
NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8") if HAS_AVX else ("-DFW_NO_TILES",)
NO_PAIRS = (*NO_TILES, "-mno-avx512bf16") if HAS_AVX else ("-DFW_NO_PAIRS",)
AVX2 = ("-mno-avx512f", "-mno-avx512bf16") if HAS_AVX else ("-DFW_AVX2",)
ANY_PROCESSOR = ("-mno-avx",) if HAS_AVX else ("-DFW_ANY",)
_SOFTWARE = ("-include", str(Path(__file__).with_name("tiles_in_software.h")))
TILES_IN_SOFTWARE = (*_SOFTWARE, *(f"-D__AMX_{part}__" for part in ("TILE", "BF16", "INT8")))
"""For where :func:`lacks_tiles_alone`."""


def lacks_tiles_alone() -> bool:
    """Whether this processor has all that the kernels by tiles of AMX need, but these."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return {"avx512_bf16", "avx512_vnni"} <= flags and "amx_bf16" not in flags


def compiled_so(monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], module: ModuleType, *names: str) -> None:
    """A module's kernels of these names are of the library that is compiled with these flags."""
    if flags == TILES_IN_SOFTWARE and not lacks_tiles_alone():
        pytest.skip("this processor has tiles, or lacks more")
    try:
        library(*flags)
    except NotCompiled as reason:
        pytest.skip(str(reason))
    for name in names:
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, Kernel(kernel.name, kernel.arguments, flags))


def with_tiles(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> None:
    """What is for processors with tiles alone: on these, and elsewhere by tiles in software."""
    if not matrix.available():
        compiled_so(monkeypatch, TILES_IN_SOFTWARE, module, *names)
        monkeypatch.setattr(matrix, "available", lambda: True)
