"""Whether all that is to train does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fw.errors import RunError
from fw.kinds.model import Adapters
from fw.kinds.sharding import Stepper

_SHOWN = 6


@contextmanager
def gradients_reach(adapters: Adapters, stepper: Stepper) -> Iterator[None]:
    """Entered around the backwards of a step; left, every parameter that adapters train has had a gradient.

    One that has none would stay as it began, while the run looks well: a layer that the model does not call, or whose result it drops.

    Raises:
        RunError: some had none, by name.
    """
    without = {name: parameter for name, parameter in stepper.parameters() if name in adapters.tensors and parameter.requires_grad}
    hooks = []
    for name, parameter in list(without.items()):

        def came(_: Tensor, name: str = name) -> None:
            without.pop(name, None)

        hooks.append(parameter.register_post_accumulate_grad_hook(came))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if without:
        names = list(without)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise RunError(
            f"no gradient reaches {', '.join(names[:_SHOWN])}{more}, which peft is to train: the model does not use them; leave them out"
        )
