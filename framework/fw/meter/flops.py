"""What a model computes and how fast a device could multiply matrices, for model FLOPs utilization."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fw.kernels.fp32_products import multiplied
from fw.kernels.of_cpu import multiplies
from fw.kinds.model import CausalLM
from fw.meter.devices import of_product


@dataclass(frozen=True)
class ModelFlops:
    """What a model needs for sequences of any length, kept where the model's parameters may be divided by now.

    FLOPs per token rise with the length, in straight lines that bend at the attention's windows: between ``lengths`` they are interpolated.
    """

    lengths: NDArray[np.float64]
    per_token: NDArray[np.float64]
    products: float
    """Weights that a token is multiplied with."""

    @staticmethod
    def of(model: CausalLM, longest: int) -> ModelFlops:
        """Of ``model`` whole and as it was built, for sequences up to ``longest``."""
        windows = {shape.window for shape in model.kv_shapes if shape.window is not None and shape.window < longest}
        lengths = sorted({1, longest, *windows})
        per_token = [model.flops_per_token(length) for length in lengths]
        return ModelFlops(np.array(lengths, np.float64), np.array(per_token, np.float64), model.flops_per_token(0) / 6)

    def with_adapters(self, model: CausalLM) -> ModelFlops:
        """Of the model these are of, with its adapters: 6 operations per added weight and token, and of weights that are frozen 4, since
        their gradient is not computed."""
        if model.adapters is None:
            return self
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1 and id(p) not in tables}
        added = sum(size for name, size in trained.items() if name in model.adapters.added)
        frozen = self.products - (sum(trained.values()) - added)
        return replace(self, per_token=self.per_token + 6 * added - 2 * frozen)

    def for_sequences(self, lengths: NDArray[np.int64]) -> float:
        """FLOPs of a step over sequences of these lengths, each of which sees itself only."""
        return float((lengths * np.interp(lengths, self.lengths, self.per_token)).sum())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that MFU is a share of: the data sheet's dense peak where the GPU is known, else a measured matrix product.

    For float32 that is TF32's where the GPU has it, for all others float16's.
    """
    if device.type == "cuda":
        known = of_product(torch.cuda.get_device_name(device))
        if known is not None:
            peaks = known.peak_flops
            return peaks.get("tf32", peaks["float32"]) if dtype == torch.float32 else peaks["float16"]
    return _measured(device, dtype)


def _measured(device: torch.device, dtype: torch.dtype) -> float:
    if device.type == "cpu" and not multiplies(dtype):
        dtype = torch.float32  # elsewhere torch's products in 16 bits are loops: no peak to measure against, and seconds to do so
    return _of_products(device, dtype, torch.get_num_threads())


@functools.cache
def _of_products(device: torch.device, dtype: torch.dtype, threads: int, size: int = 1024) -> float:
    """The best of some products of ``size`` × ``size`` matrices on so many threads: at least 3, a tenth of a second of them."""
    own = torch.Generator().manual_seed(0)  # a run's random numbers are the same whether or not this has been measured before
    left = torch.randn(size, size, generator=own).to(device, dtype)
    times: list[float] = []
    multiplied(left, left)
    while len(times) < 3 or sum(times) < 0.1:
        start = time.perf_counter()
        multiplied(left, left)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(times)
