"""Recomputation of modules chosen by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from fw.api import ActivationPlugin, CausalLM, StepSpec, UserError
from fw_plugins.activation.recompute import recompute


@dataclass
class ModulesConfig:
    """Which modules."""

    patterns: list[str] = field(default_factory=lambda: ["*.mlp"])
    """Names of modules inside the blocks, as `fw checkpoint inspect` shows those of their parameters, where `*` stands for anything:
    `layers.*.mlp`, `*.self_attn`, `layers.[0-7]`. What a chosen module contains is recomputed with it."""

    def __post_init__(self) -> None:
        if not self.patterns:
            raise UserError("activation.patterns: empty, so that nothing would be recomputed; use activation=none")


class Modules(ActivationPlugin):
    """Modules chosen by name are recomputed: of each only its inputs stay."""

    api = 1
    Config = ModulesConfig
    config: ModulesConfig

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """Every pattern must name something."""
        names = [name for name, _ in _inside_blocks(model)]
        for pattern in self.config.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(dict.fromkeys(name for name in names if name.count(".") <= 2).keys())
                raise UserError(f"activation.patterns: '{pattern}' is no module inside the blocks; there are {_short(some)}")

    def apply(self, model: CausalLM, spec: StepSpec, sequence_length: int) -> None:
        """The outermost of what the patterns name."""
        done: tuple[str, ...] = ()
        for name, module in _inside_blocks(model):
            if not name.startswith(done) and any(fnmatchcase(name, pattern) for pattern in self.config.patterns):
                recompute(module)
                done += (f"{name}.",)


def _inside_blocks(model: CausalLM) -> Iterator[tuple[str, nn.Module]]:
    """The blocks and what they contain, each before what it contains."""
    inside = {id(module) for block in model.blocks for module in block.modules()}
    return ((name, module) for name, module in model.named_modules() if id(module) in inside)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]} …"
