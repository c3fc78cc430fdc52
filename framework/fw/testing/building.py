"""A plugin as a config builds it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from fw import config as configuration
from fw.config import fill
from fw.kinds import KINDS
from fw.recipe.choosing import choose
from fw.registry import Plugin


def build(kind: str, chosen: Mapping[str, Any]) -> Plugin:
    """What a config means that has ``kind: {name: …, …}``.

    Raises:
        UserError: as a config's user is told.
    """
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "options.yaml"
        file.write_text(yaml.safe_dump({kind: [dict(chosen)] if KINDS[kind].many else dict(chosen)}))
        config = configuration.load(file)
        (pick,) = choose(KINDS[kind], config)
        options: Any = fill(pick.cls.Config, config, pick.path, pick.options, OmegaConf.create(dict(config.tree)))
    return pick.cls(options)
