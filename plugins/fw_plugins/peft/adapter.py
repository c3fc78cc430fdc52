"""Bottleneck adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from fw.api import Init, PeftPlugin, UserError, adapters_are_off
from fw_plugins.peft.changed import Added, ChangedLayers, become, patterns, refuse_unknown, target_modules

_READ = {"peft_type", "bottleneck_size", "non_linearity", "scaling", "target_modules", "exclude_modules"}
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": F.tanh}


@dataclass
class AdapterConfig:
    """How wide the bottleneck is, and where it stands."""

    size: int = 64
    """Features of the bottleneck. A layer of O outputs gets 2 · size · O + size + O parameters that train; backward keeps the layer's
    output and the bottleneck besides."""
    activation: Literal["relu", "gelu", "silu", "tanh"] = "gelu"
    """Between the two projections."""
    scale: float = 1.0
    """The change is multiplied by this. No effect on memory."""
    targets: list[str] = field(default_factory=lambda: ["o_proj", "down_proj"])
    """Behind which layers, as `peft.targets` of lora; those that end attention and feed-forward network (GPT-2: `c_proj`)."""
    exclude: list[str] = field(default_factory=list)
    """Behind which of these not."""
    adapter: str = ""
    """Directory of an adapter to begin from; empty for a new one. Its configuration must be the one given here."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"peft.size: {self.size} is too small; the least is 1")
        if not self.targets:
            raise UserError("peft.targets: empty, so that nothing would be changed; name layers")


class Bottleneck(ChangedLayers):
    """Bottleneck adapters: a narrow network with a residual behind layers (Houlsby et al. 2019, https://arxiv.org/abs/1902.00751)."""

    api = 1
    Config = AdapterConfig
    config: AdapterConfig
    peft_types: ClassVar[tuple[str, ...]] = ("BOTTLENECK",)
    must_agree: ClassVar[Mapping[str, Any]] = {"peft_type": "", "non_linearity": "gelu", "scaling": 1.0}
    not_divided_because: ClassVar[str] = "a bottleneck adapter sees the whole output of its layer"

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """The peft library has no such kind: a file of fw's own, in its layout."""
        refuse_unknown(raw, _READ)
        options = AdapterConfig(
            size=raw.get("bottleneck_size", 64),
            activation=raw.get("non_linearity", "gelu"),
            scale=raw.get("scaling", 1.0),
            targets=patterns(raw.get("target_modules")),
            exclude=patterns(raw.get("exclude_modules")),
        )
        if options.activation not in _FUNCTIONS:
            raise UserError(f"non_linearity {options.activation} is not among {', '.join(_FUNCTIONS)}")
        return cls(options)

    def change(self, module: nn.Linear, name: str) -> Iterator[Added]:
        """Two projections with biases; the second begins at zero, and so does the change."""
        size, out = self.config.size, module.out_features
        shapes = {"adapter_down": (size, out), "adapter_down_bias": (size,), "adapter_up": (out, size), "adapter_up_bias": (out,)}
        become(module, BottleneckLinear, shapes)
        module.adapter_function, module.adapter_scale = self.config.activation, self.config.scale  # type: ignore[assignment]
        yield Added("adapter_down", Init(bound=1 / math.sqrt(out)), "adapter_down.weight")
        yield Added("adapter_down_bias", Init(), "adapter_down.bias")
        yield Added("adapter_up", Init(), "adapter_up.weight")
        yield Added("adapter_up_bias", Init(), "adapter_up.bias")

    def described(self, names: Sequence[str], others: Sequence[str], transposed: bool) -> dict[str, Any]:
        """The options."""
        return {
            "peft_type": "BOTTLENECK",
            "bottleneck_size": self.config.size,
            "non_linearity": self.config.activation,
            "scaling": self.config.scale,
            "target_modules": target_modules(names, others),
        }


class BottleneckLinear(nn.Linear):
    """``y + s · (U f(D y + d) + u)`` for ``y = W x + b``."""

    adapter_down: nn.Parameter
    """``[R, O]``."""
    adapter_down_bias: nn.Parameter
    adapter_up: nn.Parameter
    """``[O, R]``."""
    adapter_up_bias: nn.Parameter
    adapter_function: str
    adapter_scale: float

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        y_O = super().forward(x_I)
        if adapters_are_off():
            return y_O
        inner_R = _FUNCTIONS[self.adapter_function](F.linear(y_O, self.adapter_down, self.adapter_down_bias))
        return y_O + self.adapter_scale * F.linear(inner_R, self.adapter_up, self.adapter_up_bias)
