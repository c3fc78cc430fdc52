"""Weights in the compute dtype for as long as an evaluation lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def weights_in(model: nn.Module, dtype: torch.dtype, *, leave_device: bool) -> Iterator[None]:
    """Modules see floating-point parameters in ``dtype``, without gradients. Buffers stay: they are computed for what they are used in.

    The parameters themselves stay the same objects, so that whoever knows them (optimizers, hooks, wrappers) need not be told.

    Args:
        leave_device: keep the parameters' bytes in host memory meanwhile (page-locked where they are on a GPU), so that only the converted
            ones are on the device. They come back to the bit.
    """
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype
    ]
    converted: dict[nn.Parameter, Tensor] = {}
    kept: dict[nn.Parameter, Tensor] = {}
    try:
        for module, name, parameter in places:
            if parameter not in converted:  # tied weights are one parameter in several places
                converted[parameter] = parameter.detach().to(dtype)
                if leave_device:
                    host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
                    kept[parameter] = host.copy_(parameter.detach())
                    parameter.untyped_storage().resize_(0)
            module._parameters[name] = converted[parameter]  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
        converted.clear()
        while kept:
            parameter, host = kept.popitem()
            parameter.untyped_storage().resize_(host.nbytes)
            with torch.no_grad():
                parameter.detach().copy_(host)
