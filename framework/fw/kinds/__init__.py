"""The kinds of plugin: which there are, what each decides, and where its contract stands. Importing this imports no contract."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fw import registry
from fw.registry import Apis, Plugin

P = TypeVar("P", bound=Plugin)


@dataclass(frozen=True)
class Kind:
    """``default`` is the plugin taken where a config names none, ``None`` where a config must; ``many`` where a list is allowed;
    ``apis`` are the versions of the contract that this core speaks; ``of`` is what it is a part of, a training ``run`` or ``inference``."""

    name: str
    decides: str
    contract: str
    default: str | None
    many: bool = False
    apis: Apis = field(default_factory=Apis)
    of: str = "run"

    def load_contract(self) -> type[Plugin]:
        """Import the contract's class."""
        module, _, name = self.contract.partition(":")
        cls: type[Plugin] = getattr(importlib.import_module(module), name)
        return cls


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("model", "architecture and size", "fw.kinds.model:ModelPlugin", None),
        Kind("quantization", "bits of frozen weights", "fw.kinds.quantization:QuantizationPlugin", "none"),
        Kind("peft", "which small part trains", "fw.kinds.peft:PeftPlugin", "none"),
        Kind("attention", "how attention is computed", "fw.kinds.attention:AttentionPlugin", "sdpa"),
        Kind("data", "where tokens come from", "fw.kinds.data:DataPlugin", None),
        Kind("objective", "what is minimised", "fw.kinds.objective:ObjectivePlugin", "causal_lm"),
        Kind(
            "precision",
            "dtypes of parameters, compute and reduction; loss scaling",
            "fw.kinds.precision:PrecisionPlugin",
            "fp32",
        ),
        Kind("sharding", "how ranks divide the model", "fw.kinds.sharding:ShardingPlugin", "single"),
        Kind("activation", "what backward recomputes", "fw.kinds.activation:ActivationPlugin", "none"),
        Kind("offload", "what lives on the host or disk", "fw.kinds.offload:OffloadPlugin", "tiers"),
        Kind("optimizer", "the update rule", "fw.kinds.optimizer:OptimizerPlugin", "adamw"),
        Kind("schedule", "the learning rate over time", "fw.kinds.schedule:SchedulePlugin", "constant"),
        Kind("checkpoint", "how state reaches disk and comes back", "fw.kinds.checkpoint:CheckpointPlugin", "safetensors"),
        Kind("logger", "where metrics go", "fw.kinds.logger:LoggerPlugin", "csv", many=True),
        Kind("kv_cache", "how keys and values are kept", "fw.kinds.kv_cache:KVCachePlugin", "paged", of="inference"),
        Kind("launcher", "how processes start", "fw.kinds.launcher:LauncherPlugin", "local"),
    )
}


def plugin_class(contract: type[P], name: str) -> type[P]:
    """Import the plugin of this name, of the contract's kind.

    Raises:
        UserError: there is none that can be used; why.
    """
    kind = KINDS[contract.kind]
    return registry.load(kind.name, name, contract, kind.apis)


def make(contract: type[P], name: str, **options: Any) -> P:
    """A plugin, built with options, of others their defaults.

    Raises:
        UserError: there is none that can be used; why.
    """
    cls = plugin_class(contract, name)
    return cls(cls.Config(**options))
