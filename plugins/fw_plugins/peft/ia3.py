"""(IA)³."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from fw.api import Init, PeftPlugin, UserError, adapters_are_off
from fw_plugins.peft.changed import Added, ChangedLayers, become, patterns, refuse_unknown, target_modules
from fw_plugins.peft.targets import matches

_READ = {"peft_type", "target_modules", "exclude_modules", "feedforward_modules", "fan_in_fan_out", "init_ia3_weights", "modules_to_save"}


@dataclass
class Ia3Config:
    """Which layers, and which side of them is scaled."""

    targets: list[str] = field(default_factory=lambda: ["k_proj", "v_proj", "down_proj"])
    """Which layers, as `peft.targets` of lora. A layer of I → O features gets O parameters that train, or I."""
    exclude: list[str] = field(default_factory=list)
    """Which of these not."""
    feedforward: list[str] = field(default_factory=lambda: ["down_proj"])
    """Those of the targets whose inputs are scaled; of the others the outputs are."""
    adapter: str = ""
    """Directory of an adapter to begin from, of fw's or peft's; empty for a new one."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise UserError("peft.targets: empty, so that nothing would be changed; name layers")


class Ia3(ChangedLayers):
    """(IA)³: a number per feature scales what some linear layers see or give (Liu et al. 2022, https://arxiv.org/abs/2205.05638)."""

    api = 1
    Config = Ia3Config
    config: Ia3Config
    peft_types: ClassVar[tuple[str, ...]] = ("IA3",)
    must_agree: ClassVar[Mapping[str, Any]] = {"peft_type": "", "feedforward_modules": []}

    @classmethod
    def from_peft(cls, raw: Mapping[str, Any]) -> PeftPlugin:
        """As peft's ``IA3Config``."""
        refuse_unknown(raw, _READ - {"modules_to_save"})
        targets, exclude, forward = (patterns(raw.get(key)) for key in ("target_modules", "exclude_modules", "feedforward_modules"))
        made = cls(Ia3Config(targets=targets, exclude=exclude, feedforward=forward))
        made.as_peft = True
        return made

    def change(self, module: nn.Linear, name: str) -> Iterator[Added]:
        """One vector."""
        inputs = any(matches(pattern, name) for pattern in self.config.feedforward)
        become(module, InputScaled if inputs else OutputScaled, {"ia3_l": (1, module.in_features) if inputs else (module.out_features, 1)})
        yield Added("ia3_l", Init(value=1.0), "ia3_l", (None, 1) if inputs else (0, None), decays=False)

    def described(self, names: Sequence[str], others: Sequence[str], transposed: bool) -> dict[str, Any]:
        """As peft's ``IA3Config``."""
        inputs = [name for name in names if any(matches(pattern, name) for pattern in self.config.feedforward)]
        return {
            "peft_type": "IA3",
            "target_modules": target_modules(names, others),
            "feedforward_modules": target_modules(inputs, others),
            "fan_in_fan_out": transposed,
            "init_ia3_weights": True,
        }


class InputScaled(nn.Linear):
    """``W (l ∘ x) + b``."""

    ia3_l: nn.Parameter
    """``[1, I]``."""

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        return super().forward(x_I if adapters_are_off() else (x_I * self.ia3_l.flatten()).to(x_I.dtype))


class OutputScaled(nn.Linear):
    """``l ∘ (W x + b)``."""

    ia3_l: nn.Parameter
    """``[O, 1]``."""

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        out_O = super().forward(x_I)
        return out_O if adapters_are_off() else (out_O * self.ia3_l.flatten()).to(out_O.dtype)
