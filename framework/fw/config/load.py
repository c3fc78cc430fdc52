"""Layers: the files a config extends, the file itself, then the overrides; later layers win, lists replace.

A section is ``kind: name`` or ``kind: {name: …, options}``. A layer that names another plugin replaces the section, since the options of
one plugin mean nothing to another; a layer that only gives options merges into it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import Any

from fw.config import yaml_source
from fw.config.origin import DEFAULT, Origin, Path, override
from fw.errors import UserError

PLUGINS = "plugins"
"""Section that names files of plugins; such a path is seen from the file that has it, as those of ``extends`` are."""


@dataclass(frozen=True)
class Config:
    """A layered config, values untyped and interpolations unresolved, each with its origin.

    ``name`` is the main file's stem; ``tree`` maps sections to their content; ``origins`` maps every path to where it was set.
    """

    name: str
    tree: Mapping[str, Any]
    origins: Mapping[Path, Origin]
    files: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def origin(self, path: Path) -> Origin:
        """The origin of ``path``, or of the nearest section around it, or of the first value inside it, or :data:`DEFAULT`."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return next((origin for known, origin in self.origins.items() if known[: len(path)] == path), DEFAULT)

    def was_set(self, *path: str) -> bool:
        """Whether the user gave this value, in a file or as an override."""
        return path in self.origins


def load(file: str | FilePath, overrides: Sequence[str] = ()) -> Config:
    """Read ``file``, what it extends, and ``key=value`` overrides.

    Raises:
        UserError: a missing file, malformed YAML, a cycle of ``extends``, or a malformed override.
    """
    path = FilePath(file)
    layers = _Layers()
    layers.add_file(path, ())
    for item in overrides:
        layers.add_override(item)
    return Config(path.stem, layers.tree, layers.origins, tuple(layers.files), tuple(overrides))


def overridden(config: Config, overrides: Sequence[str]) -> Config:
    """``config`` with further overrides, as if they had been given with it.

    Raises:
        UserError: a malformed override.
    """
    layers = _Layers(copy.deepcopy(dict(config.tree)), config.origins)
    for item in overrides:
        layers.add_override(item)
    return replace(config, tree=layers.tree, origins=layers.origins, overrides=(*config.overrides, *overrides))


def _from(directory: FilePath, value: Any) -> Any:
    """Paths of files, made absolute, so that whoever reads the config, wherever it is written to, finds them; all else as it is."""
    if isinstance(value, list):
        return [_from(directory, item) for item in value]
    return str((directory / FilePath(value).expanduser()).resolve()) if isinstance(value, str) and value else value


class _Layers:
    def __init__(self, tree: dict[str, Any] | None = None, origins: Mapping[Path, Origin] | None = None) -> None:
        self.tree: dict[str, Any] = tree or {}
        self.origins: dict[Path, Origin] = dict(origins or {})
        self.files: list[str] = []

    def add_file(self, file: FilePath, opened: tuple[FilePath, ...]) -> None:
        """Add what ``file`` extends, then the file."""
        real = file.resolve()
        if real in opened:
            chain = " → ".join(p.name for p in (*opened[opened.index(real) :], real))
            raise UserError(f"{file}: 'extends' goes in a circle: {chain}")
        tree, origins = yaml_source.read_file(file)
        bases = tree.pop("extends", None) or []
        bases = bases if isinstance(bases, list) else [bases]
        for base in bases:
            if not isinstance(base, str):
                raise UserError(f"{origins[('extends',)]}: 'extends' takes a file or a list of files, not {base!r}")
            base_file = file.parent / base
            if not base_file.is_file():
                raise UserError(f"{origins[('extends',)]}: extends '{base}', which is no file ({base_file})")
            self.add_file(base_file, (*opened, real))
        self.files.append(str(file))
        if PLUGINS in tree:
            tree[PLUGINS] = _from(file.parent, tree[PLUGINS])
        for section, value in tree.items():
            self._merge(section, value, {p: o for p, o in origins.items() if p[0] == section})

    def add_override(self, text: str) -> None:
        key, equals, value_text = text.partition("=")
        parts = tuple(key.strip().split("."))
        if not equals or not all(parts):
            raise UserError(f"override '{text}' is not of the form key=value, like train.max_steps=100")
        if parts == ("extends",):
            raise UserError("'extends' belongs in a file; give the other file's values as overrides, or write a file that extends it")
        origin = override(text)
        value, inside = yaml_source.parse_value(value_text, origin)
        tree: Any = _from(FilePath(), value) if parts[0] == PLUGINS else value
        origins = {(*parts, *inner): of for inner, of in inside.items()}
        if len(parts) > 1 and isinstance(self.tree.get(parts[0]), list):
            self._set_in_list(parts, value, origins, text)
            return
        for part in reversed(parts[1:]):
            tree = {part: tree}
        self._merge(parts[0], tree, origins)

    def _set_in_list(self, parts: Path, value: Any, origins: dict[Path, Origin], text: str) -> None:
        """``logger.0.option=value``: an index, or the name of an item, picks the item of a list."""
        items: list[Any] = self.tree[parts[0]]
        refusal = UserError(f"override '{text}': nothing there has options")
        names = [item.get("name") if isinstance(item, Mapping) else item for item in items]
        pick = parts[1]
        index = int(pick) if pick.isdecimal() else names.index(pick) if pick in names else -1
        if not 0 <= index < len(items):
            raise UserError(f"override '{text}': '{parts[0]}' is a list of {names}; pick one of them by name or by number from 0")
        if len(parts) == 2:
            items[index] = value
        else:
            item = items[index]
            node = items[index] = {"name": item} if isinstance(item, str) else item
            for part in parts[2:-1]:
                node = node.setdefault(part, {}) if isinstance(node, dict) else None
            if not isinstance(node, dict):
                raise refusal
            node[parts[-1]] = value
        self.origins.update({(p[0], str(index), *p[2:]): o for p, o in origins.items()})

    def _merge(self, section: str, value: Any, origins: Mapping[Path, Origin]) -> None:
        """Merge one top-level section."""
        old = self.tree.get(section)
        if isinstance(value, Mapping):
            if isinstance(old, str) and ("name" not in value or value["name"] == old):
                old = {"name": old}
                self.origins.setdefault((section, "name"), self.origins.get((section,), DEFAULT))
            same_plugin = isinstance(old, Mapping) and value.get("name") in (None, old.get("name"))
            if isinstance(old, Mapping) and (same_plugin or "name" not in old):
                self.tree[section] = layered(old, value)
                self.origins.update(origins)
                return
        self.tree[section] = copy.deepcopy(value)
        for known in [p for p in self.origins if p[0] == section]:
            del self.origins[known]
        self.origins.update(origins)


def layered(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``new`` over ``old``: nested sections merge, unless the new one says that it is something else; anything else is replaced."""
    merged = dict(old)
    for key, value in new.items():
        before = merged.get(key)
        if isinstance(before, Mapping) and isinstance(value, Mapping) and not _another_kind(before, value):
            merged[key] = layered(before, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def _another_kind(before: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether a nested section says that it is something else now (``name``, ``rope_type``), to which the old options mean nothing."""
    return any(value[key] != before[key] for key in value.keys() & before.keys() if key == "name" or str(key).endswith("_type"))
