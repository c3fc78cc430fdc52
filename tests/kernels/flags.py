"""Flags by which kernels are compiled as for processors that have less than this one."""

from __future__ import annotations

import torch

HAS_AVX = torch.backends.cpu.get_cpu_capability().startswith("AVX")
NO_TILES = ("-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8") if HAS_AVX else ("-DFW_NO_TILES",)
NO_PAIRS = (*NO_TILES, "-mno-avx512bf16") if HAS_AVX else ("-DFW_NO_PAIRS",)
AVX2 = ("-mno-avx512f", "-mno-avx512bf16") if HAS_AVX else ("-DFW_AVX2",)
ANY_PROCESSOR = ("-mno-avx",) if HAS_AVX else ("-DFW_ANY",)
