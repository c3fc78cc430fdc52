"""The configuration of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fw.errors import UserError
from fw.locate import CONFIG
from fw.place import Place, place


def read_config(directory: Path | Place) -> dict[str, Any]:
    """``config.json``.

    Raises:
        UserError: it is missing or no JSON object.
    """
    directory = place(directory)
    path = directory / CONFIG
    try:
        config = json.loads(directory.read(CONFIG))
    except FileNotFoundError:
        raise UserError(f"{directory} is no model directory: it has no {CONFIG}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is no JSON object")
    return config
