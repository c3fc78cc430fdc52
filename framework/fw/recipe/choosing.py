"""Which plugins a config names, and sections of options with their defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fw import registry
from fw.config import PLUGINS, Config, interpolated, layered
from fw.errors import UserError, did_you_mean
from fw.kinds import KINDS, Kind
from fw.registry import Plugin


def check_sections(config: Config, known: Sequence[str], elsewhere: Mapping[str, str]) -> None:
    """Refuse what is no section.

    Args:
        elsewhere: sections that mean nothing here, and where they do.

    Raises:
        UserError: the first one found.
    """
    for section in config.tree:
        if section in elsewhere:
            raise UserError(f"{config.origin((section,))}: section '{section}' means nothing here; {elsewhere[section]}")
        if section not in known:
            raise UserError(
                f"{config.origin((section,))}: unknown section '{section}'{did_you_mean(section, known)} (there are: {', '.join(known)})"
            )


def load_plugins(config: Config) -> list[str]:
    """Run the files that a config names under ``plugins``, so that what they register can be named; which these are.

    Raises:
        UserError: it is no list of files, or one cannot be used.
    """
    value = config.tree.get(PLUGINS)
    files = [] if value is None else value if isinstance(value, list) else [value]
    for number, file in enumerate(files):
        place = config.origin((PLUGINS, str(number)) if files is value else (PLUGINS,))
        if not isinstance(file, str) or not file:
            raise UserError(f"{place}: plugins is a list of Python files, like 'plugins: [./mine.py]', not {file!r}")
        try:
            registry.load_file(file)
        except UserError as error:
            raise UserError(f"{place}: plugins: {error}") from error.__cause__
    return files


@dataclass(frozen=True)
class Pick:
    """A plugin a config names, not yet built."""

    name: str
    cls: type[Plugin]
    path: tuple[str, ...]
    options: dict[str, Any]


def choose(kind: Kind, config: Config) -> list[Pick]:
    """Those of a kind, by default where a config names none.

    Raises:
        UserError: there is no such plugin, or it cannot be loaded.
    """
    value = config.tree.get(kind.name)
    contract = kind.load_contract()
    if kind.many:
        items = [] if value is None and kind.name in config.tree else [kind.default] if value is None else value
        items = items if isinstance(items, list) else [items]
        paths = [(kind.name, str(i)) for i in range(len(items))] if isinstance(value, list) else [(kind.name,)] * len(items)
        picks = [_pick(kind, contract, item, path, config) for item, path in zip(items, paths, strict=True)]
        names = [pick.name for pick in picks]
        if len(set(names)) < len(names):
            raise UserError(f"{config.origin((kind.name,))}: {kind.name} names one plugin twice: {', '.join(names)}")
        return picks
    if kind.name not in config.tree:
        if kind.default is None:
            known = ", ".join(e.name for e in registry.entries(kind.name))
            raise UserError(
                f"{config.name}: no '{kind.name}' section, which decides {kind.decides};"
                f" add one, like '{kind.name}: NAME' (there are: {known})"
            )
        value = kind.default
    return [_pick(kind, contract, value, (kind.name,), config)]


def _pick(kind: Kind, contract: type[Plugin], value: Any, path: tuple[str, ...], config: Config) -> Pick:
    place = config.origin(path)
    if isinstance(value, str):
        value = {"name": interpolated(value, config, path)}
    if not isinstance(value, Mapping):
        raise UserError(f"{place}: {'.'.join(path)}: write '{kind.name}: NAME' or '{kind.name}: {{name: NAME, …}}', not {value!r}")
    name = value.get("name", kind.default)
    name = interpolated(name, config, (*path, "name")) if isinstance(name, str) else name
    if not isinstance(name, str):
        raise UserError(f"{place}: section '{kind.name}' has no 'name'; say which plugin it configures")
    try:
        cls = registry.load(kind.name, name, contract, kind.apis)
    except UserError as error:
        raise UserError(f"{config.origin((*path, 'name'))}: {error}") from error.__cause__
    for option, why in cls.not_options.items():
        if option in value:
            raise UserError(f"{config.origin((*path, option))}: {kind.name}.{option}: {why}")
    return Pick(name, cls, path, {str(k): v for k, v in value.items() if k != "name"})


def options_in(config: Config, name: str) -> dict[str, Any]:
    """What a config says in it.

    Raises:
        UserError: it is something else than options.
    """
    value = config.tree.get(name, {})
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{config.origin((name,))}: '{name}' is a section of options, not {value!r}")
    return {str(k): v for k, v in value.items()}


def with_defaults(config: Config, chosen: Mapping[str, list[Pick]], sections: Mapping[str, type]) -> DictConfig:
    """The whole tree with every default in it, so that an interpolation may refer to a value nobody wrote."""
    tree: dict[str, Any] = {name: _overlay(cls, options_in(config, name)) for name, cls in sections.items()}
    for kind, picks in chosen.items():
        filled = [{"name": pick.name, **_overlay(pick.cls.Config, pick.options)} for pick in picks]
        tree[kind] = filled if KINDS[kind].many else filled[0]
    return OmegaConf.create(tree)


def _overlay(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    defaults = OmegaConf.to_container(OmegaConf.structured(cls))
    assert isinstance(defaults, dict)
    return layered({str(k): v for k, v in defaults.items()}, values)
