"""The configuration of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fw.errors import UserError
from fw.locate import ADAPTER_CONFIG, CONFIG
from fw.place import Place, place

_LEAVES_BASE = {"true", "false", "none", "gaussian", "eva", "orthogonal", "mica", "lora_ga"}
"""``init_lora_weights`` of peft's ``LoraConfig`` that begin A and B alone when an adapter is read (``tuners/lora/layer.py`` there). The
others (``pissa``, ``olora``, ``corda``, ``loftq``) take what A and B begin with from the base's weight."""


def read_config(directory: Path | Place) -> dict[str, Any]:
    """``config.json``.

    Raises:
        UserError: it is missing or no JSON object.
    """
    return _json_object(place(directory), CONFIG, "model directory")


def read_adapter_config(directory: Path | Place) -> dict[str, Any]:
    """``adapter_config.json``, as peft writes it.

    Raises:
        UserError: it is missing or no JSON object, or peft alters the base's weights whenever it reads such an adapter.
    """
    config = _json_object(place(directory), ADAPTER_CONFIG, "adapter's directory")
    begun = config.get("init_lora_weights")
    if str(begun).lower() not in _LEAVES_BASE:
        raise UserError(
            f"{place(directory) / ADAPTER_CONFIG}: init_lora_weights={begun!r} has peft alter the base's weights, which are left as"
            " they are here; convert the adapter with peft (save_pretrained with path_initial_model_for_weight_conversion), or save the"
            " base that peft has altered and set true"
        )
    return config


def named_base(adapter: Path) -> str:
    """The model that an adapter is of, of the hub's in the revision that it names, as peft has it.

    Raises:
        UserError: it names none, or as :func:`read_adapter_config`.
    """
    config = read_adapter_config(adapter)
    base, revision = config.get("base_model_name_or_path") or "", config.get("revision")
    if not base:
        raise UserError(f"{adapter / ADAPTER_CONFIG} names no base; give the base, and the adapter with it")
    return f"{base}@{revision}" if revision and "@" not in base and not Path(base).exists() else base


def _json_object(directory: Place, name: str, what: str) -> dict[str, Any]:
    path = directory / name
    try:
        config = json.loads(directory.read(name))
    except FileNotFoundError:
        raise UserError(f"{directory} is no {what}: it has no {name}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no JSON object")
    return config
