"""A plugin as a config builds it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from fw import config as configuration, registry
from fw.config import fill
from fw.errors import UserError, did_you_mean
from fw.kinds import KINDS
from fw.recipe.choosing import choose
from fw.registry import Plugin
from fw.registry.discovery import REGISTERED


def from_file(file: str | Path, name: str) -> type[Plugin]:
    """The class that a file registers under a name, as ``plugins: [./file.py]`` in a config does.

    Raises:
        UserError: there is no such file, or it fails or registers no such name.
    """
    registry.load_file(file)
    where = str(Path(file).expanduser().resolve())
    found = {entry.name: cls for entry, cls in REGISTERED.items() if entry.distribution == where}
    if name not in found:
        raise UserError(f"{file} registers no '{name}'{did_you_mean(name, found)} (there are: {', '.join(found)})")
    return found[name]


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
