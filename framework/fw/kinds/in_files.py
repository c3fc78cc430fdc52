"""Parameters of a model that lie in mapped files instead of memory of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


@contextmanager
def left_out(model: nn.Module, staying: Mapping[str, Tensor]) -> Iterator[None]:
    """Meanwhile the model has no such parameters, and afterwards these tensors for them, wherever they are used."""
    parameters = dict(model.named_parameters())
    made = {id(parameters[name]): nn.Parameter(tensor, requires_grad=False) for name, tensor in staying.items()}
    places = [
        (module, name, made[id(parameter)])
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in made
    ]
    for module, name, _ in places:
        module._parameters[name] = None
    yield
    for module, name, parameter in places:
        module._parameters[name] = parameter
