"""YAML text → a plain tree and the line of every key.

YAML 1.2's core schema: ``on``, ``off``, ``yes`` and ``no`` are strings, ``1e-3`` is a number. A key given twice is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import yaml

from fw.config.origin import Origin, Path
from fw.errors import UserError


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2 instead of 1.1."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own table


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", "~nN\0"),
    ("merge", r"<<", "<"),
):
    _CoreLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), [c if c != "\0" else "" for c in _first]
    )


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # YAML 1.1 would read 010 as octal 8.
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, 0) if text.lower().startswith(("0x", "0o")) else int(text)


_CoreLoader.add_constructor("tag:yaml.org,2002:int", _integer)


def read_file(file: FilePath) -> tuple[dict[str, Any], dict[Path, Origin]]:
    """Parse one file.

    Returns:
        the tree and the origin of every key in it.

    Raises:
        UserError: missing or unreadable file, malformed YAML, a duplicate key, or a top level that is no mapping.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None
    return parse(text, str(file))


def parse(text: str, source: str) -> tuple[dict[str, Any], dict[Path, Origin]]:
    """Parse YAML text; ``source`` names it in errors and origins."""
    loader = None
    try:
        loader = _CoreLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"{source}:{node.start_mark.line + 1}: a config is a mapping of sections, like 'model: llama'")
        origins: dict[Path, Origin] = {}
        _collect(node, (), source, origins)
        tree = _with_text_keys(loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise UserError(f"{source}:{line}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = "an alias refers to what contains it" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise UserError(f"{source}: not valid YAML: {reason}") from None
    finally:
        if loader is not None:
            loader.dispose()
    return tree, origins


def _with_text_keys(value: Any) -> Any:
    """Keys are names: a key that YAML takes for a number or a truth value is the text it was written as."""
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value


def parse_value(text: str, origin: Origin) -> tuple[Any, dict[Path, Origin]]:
    """The value of an override, by the same rules as in a file, and the origins of what is in it; text that is no YAML stays a string."""
    loader = None
    whole = replace(origin, raw=text)
    try:
        loader = _CoreLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {(): whole}
        origins: dict[Path, Origin] = {}
        _collect(node, (), str(origin), origins)
        value = _with_text_keys(loader.construct_document(node))
        return value, {(): whole, **{path: replace(origin, raw=inner.raw) for path, inner in origins.items()}}
    except (yaml.YAMLError, ValueError, RecursionError):
        return text, {(): whole}
    finally:
        if loader is not None:
            loader.dispose()


class _CoreDumper(yaml.SafeDumper):
    """Writes what :class:`_CoreLoader` reads back: quotes what it would take for a number."""


_CoreDumper.yaml_implicit_resolvers = _CoreLoader.yaml_implicit_resolvers


def dump(tree: Any) -> str:
    """YAML in the order of the tree, which :func:`parse` reads back as it was."""
    return yaml.dump(_plain(tree), Dumper=_CoreDumper, sort_keys=False, allow_unicode=True, width=120)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _collect(node: yaml.Node, path: Path, source: str, origins: dict[Path, Origin]) -> None:
    if isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            key = str(key_node.value)
            place = (*path, key)
            line = key_node.start_mark.line + 1
            if place in origins and key != "<<":
                raise UserError(f"{source}:{line}: '{'.'.join(place)}' is given twice (first in line {origins[place].line})")
            origins[place] = Origin(source, line, raw=_raw(value_node))
            _collect(value_node, place, source, origins)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            place = (*path, str(index))
            origins[place] = Origin(source, item.start_mark.line + 1, raw=_raw(item))
            _collect(item, place, source, origins)


def _raw(node: yaml.Node) -> str | None:
    return node.value if isinstance(node, yaml.ScalarNode) else None
