"""The configuration of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fw.errors import UserError
from fw.locate import ADAPTER_CONFIG, CONFIG
from fw.place import Place, place


def read_config(directory: Path | Place) -> dict[str, Any]:
    """``config.json``.

    Raises:
        UserError: it is missing or no JSON object.
    """
    return _json_object(place(directory), CONFIG, "model directory")


def read_adapter_config(directory: Path | Place) -> dict[str, Any]:
    """``adapter_config.json``, as peft writes it.

    Raises:
        UserError: it is missing or no JSON object.
    """
    return _json_object(place(directory), ADAPTER_CONFIG, "adapter's directory")


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
