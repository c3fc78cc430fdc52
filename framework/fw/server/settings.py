"""What ``fw serve`` was asked to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fw.config import PLUGINS, Config, Origin, ServeSection, check_interpolations, fill, load, overridden
from fw.errors import UserError

SECTION = "serve"
_KEYS = "FW_API_KEYS"
_COMMAND_LINE = Origin("command line")
_SUFFIXES = (".yaml", ".yml")
_OF_A_RUN = ("train", "data")
_OF_ITS_SERVER = (SECTION, "inference", "kv_cache", PLUGINS)
"""Sections that such a config, or one that extends it, may have for its server; others say how it is trained."""


@dataclass(frozen=True)
class Settings:
    """Of a server.

    Attributes:
        path: the model's.
        config: what is said of generating, which the engine understands.
        keys: one of which a request must have; empty where none is asked for.
    """

    path: str
    serve: ServeSection
    config: Config
    keys: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """By which requests ask for the model."""
        return self.serve.name or Path(self.path).resolve().name or self.path

    @property
    def adapters(self) -> list[tuple[str, str]]:
        """Names and directories."""
        pairs = (text.partition("=") for text in self.serve.adapters)
        return [(name, directory) for name, _, directory in pairs]


def settings(where: str, overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> Settings:
    """From a model, or a config of a server or of a training run, and overrides.

    Args:
        options: of the section ``serve``, which go before overrides. Their text is taken as it is: it is no YAML, and ``${`` means nothing.

    Raises:
        UserError: there is no model, or an option that is wrong or does not go with another.
    """
    path, config = _read(where, overrides)
    check_interpolations(config)
    given = config.tree.get(SECTION) or {}
    if not isinstance(given, dict):
        raise UserError(f"{config.origin((SECTION,))}: '{SECTION}' is a section of options, not {given!r}")
    options = options or {}
    given = {**given, **{name: _verbatim(value) for name, value in options.items()}}
    config = replace(config, origins={**config.origins, **{(SECTION, name): _COMMAND_LINE for name in options}})
    whole = OmegaConf.create({**config.tree, SECTION: {**vars(ServeSection()), **given}})
    serve = fill(ServeSection, config, (SECTION,), given, whole)
    path = path or serve.model
    if not path:
        raise UserError(f"{where}: no model; add 'serve: {{model: DIR}}'")
    if path != serve.model and serve.model:
        raise UserError(f"{config.origin((SECTION, 'model'))}: serve.model: the model is {path} already; leave one of them out")
    keys = _keys(serve)
    if serve.is_public and not keys and not serve.insecure:
        raise UserError(
            f"serve.host: {serve.host} can be reached by others, and there are no API keys; put some into a file for serve.api_keys or into"
            f" {_KEYS}, or say serve.insecure=true (--insecure)"
        )
    rest = {section: content for section, content in config.tree.items() if section != SECTION}
    made = Settings(path, serve, replace(config, tree=rest), keys)
    names = [made.name, *(name for name, _ in made.adapters)]
    if twice := next((name for number, name in enumerate(names) if name in names[:number]), None):
        raise UserError(
            f"{config.origin((SECTION, 'adapters'))}: serve.adapters: two models would have the name {twice}; give the adapter another, or"
            " the model by serve.name"
        )
    return made


def _verbatim(value: Any) -> Any:
    """Text in which OmegaConf finds nothing to resolve."""
    if isinstance(value, list):
        return [_verbatim(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _read(where: str, overrides: Sequence[str]) -> tuple[str, Config]:
    file = Path(where)
    if file.suffix not in _SUFFIXES or not file.is_file():
        return where, overridden(Config("serve", {}, {}), overrides)
    config = load(file)
    if not any(section in config.tree for section in _OF_A_RUN):
        return "", overridden(config, overrides)
    # Of a training run: what it trains is served, however it was trained.
    resolved = OmegaConf.create(dict(config.tree))
    run = OmegaConf.select(resolved, "train.run_dir") or f"runs/{config.name}"
    if not Path(str(run)).is_dir():
        raise UserError(f"{where}: its run directory {run} is not there; train first (fw train {where}), or give a model directory")
    kept = {section: content for section, content in config.tree.items() if section in _OF_ITS_SERVER}
    return str(run), overridden(replace(config, tree=kept), overrides)


def _keys(serve: ServeSection) -> frozenset[str]:
    found = [key.strip() for key in os.environ.get(_KEYS, "").split(",")]
    if serve.api_keys:
        try:
            found += [line.strip() for line in Path(serve.api_keys).expanduser().read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise UserError(f"serve.api_keys: {serve.api_keys} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"serve.api_keys: {serve.api_keys} is no text") from None
    keys = frozenset(key for key in found if key and not key.startswith("#"))
    if serve.api_keys and not keys:
        raise UserError(f"serve.api_keys: {serve.api_keys} has no key in it; write one in each line")
    return keys
