"""Giving a section its types: untyped values are merged into a dataclass, and what does not fit is refused with its place."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from fw.config.load import Config
from fw.config.origin import Path
from fw.errors import UserError, did_you_mean

T = TypeVar("T")


def fill(cls: type[T], config: Config, path: Path, values: Mapping[str, Any], resolved: DictConfig) -> T:
    """Build ``cls`` from ``values`` found at ``path``.

    Args:
        cls: a dataclass; its field types are the schema.
        values: the user's values, by field.
        resolved: the whole tree with defaults in it, against which ``${…}`` is resolved.

    Raises:
        UserError: an unknown key, a value of the wrong type, an interpolation that leads nowhere, or what the dataclass refuses.
    """
    _check_keys(cls, config, path, values)
    node = OmegaConf.structured(cls)
    node._set_parent(resolved)
    for key, value in values.items():
        _assign(node, cls, key, value, config, (*path, key))
    try:
        made = OmegaConf.to_object(node)
    except InterpolationKeyError as error:
        raise UserError(f"{config.origin(path)}: {'.'.join(path)}: {_first_line(error)}") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{config.origin(path)}: {error.full_key or '.'.join(path)}: {_first_line(error)}") from None
    except UserError as error:
        raise UserError(f"{_place(config, path, str(error))}: {error}") from None
    except ValueError as error:
        raise UserError(f"{_place(config, path, str(error))}: {'.'.join(path)}: {error}") from None
    assert isinstance(made, cls)
    return made


def _place(config: Config, path: Path, message: str) -> str:
    """The origin of the option a message names, else of its section."""
    inside = sorted((p for p in config.origins if p[: len(path)] == path and p != path), key=len, reverse=True)
    named = [p for p in inside if ".".join(p) in message] or [p for p in inside if p[-1] in message.split()]
    if named:
        return str(config.origins[named[0]])
    return str(config.origin(path))


def _assign(node: DictConfig, cls: type, key: str, value: Any, config: Config, path: Path) -> None:
    place = f"{config.origin(path)}: {'.'.join(path)}"
    hint = typing.get_type_hints(cls)[key]
    nested = _nested(hint)
    if nested is not None and isinstance(value, Mapping):
        before = node[key]
        if before is None or any(name in value and value[name] != before[name] for name in variant_fields(nested)):
            OmegaConf.update(node, key, OmegaConf.structured(nested), merge=False)
        for inner, inner_value in value.items():
            _assign(node[key], nested, str(inner), inner_value, config, (*path, str(inner)))
        return
    item = _item(hint)
    if item is not None and isinstance(value, list) and all(isinstance(each, Mapping) for each in value):
        OmegaConf.update(node, key, [OmegaConf.structured(item) for _ in value], merge=False)
        for number, each in enumerate(value):
            for inner, inner_value in each.items():
                _assign(node[key][number], item, str(inner), inner_value, config, (*path, str(number), str(inner)))
        return
    value = _as_written(value, hint, config, path)
    wrong = UserError(f"{place}: {value!r} is not of type {_type_name(hint)}")
    if (nested or item) is not None and value is not None and not (isinstance(value, str) and "${" in value):
        raise wrong
    kinds = _without_none(hint)
    if kinds == (bool,) and isinstance(value, int | float) and not isinstance(value, bool):
        raise wrong
    if typing.get_origin(hint) is list and isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        raise wrong
    try:
        OmegaConf.update(node, key, value)
        resolved = OmegaConf.select(node, key)  # resolves an interpolation now, so that its error has this place
    except InterpolationKeyError as error:
        raise UserError(f"{place}: {_first_line(error)}") from None
    except OmegaConfBaseException as error:
        text = _first_line(error)
        if any(sign in text for sign in ("could not be converted", "ncompatible", "nvalid value assigned")):
            raise wrong from None
        raise UserError(f"{place}: {text}") from None
    if isinstance(resolved, float) and not math.isfinite(resolved):
        raise UserError(f"{place}: {value!r} is not a finite number")


def _as_written(value: Any, hint: Any, config: Config, path: Path) -> Any:
    """What an option that takes text, or a list, gets when YAML saw something else in what was written."""
    raw = config.origins[path].raw if path in config.origins else None
    if _without_none(hint) == (str,) and value is not None and not isinstance(value, str) and raw is not None:
        return raw
    kinds = _without_none(hint)
    if isinstance(value, str) and len(kinds) == 1 and typing.get_origin(kinds[0]) is list and "${" not in value:
        return [value]  # a list of one may be written without brackets
    return value


def _without_none(hint: Any) -> tuple[Any, ...]:
    """The types a hint allows besides None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(arg for arg in typing.get_args(hint) if arg is not type(None))
    return (hint,)


def _nested(hint: Any) -> type | None:
    """The dataclass that a hint asks for, optional or not."""
    kinds = _without_none(hint)
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and dataclasses.is_dataclass(kinds[0]) else None


def _item(hint: Any) -> type | None:
    """The dataclass that a hint asks for a list of."""
    kinds = _without_none(hint)
    return _nested(typing.get_args(kinds[0])[0]) if len(kinds) == 1 and typing.get_origin(kinds[0]) is list else None


def variant_fields(cls: type) -> list[str]:
    """Fields whose value says what the others mean (``metadata={"variant": True}``): a layer that gives another one starts afresh."""
    return [f.name for f in dataclasses.fields(cls) if f.metadata.get("variant")]


def _type_name(hint: Any) -> str:
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", str(hint))


def check_interpolations(config: Config) -> None:
    """Refuse a malformed ``${…}`` with its place.

    Raises:
        UserError: the first one found.
    """
    for path, text in _texts(config.tree):
        if "${" in text:
            try:
                OmegaConf.create({"value": text})
            except OmegaConfBaseException as error:
                raise UserError(f"{config.origin(path)}: {'.'.join(path)}: '{text}' is no interpolation: {_first_line(error)}") from None


def interpolated(text: str, config: Config, path: Path) -> Any:
    """``text`` with its interpolations resolved against what was written, for what is needed before the defaults are known.

    Raises:
        UserError: an interpolation leads nowhere.
    """
    if "${" not in text:
        return text
    try:
        return OmegaConf.select(OmegaConf.create({**config.tree, "__value__": text}), "__value__")
    except OmegaConfBaseException as error:
        raise UserError(f"{config.origin(path)}: {'.'.join(path)}: {_first_line(error)}") from None


def _texts(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _texts(inner, (*path, str(key)))


def _check_keys(cls: type, config: Config, path: Path, values: Mapping[str, Any]) -> None:
    """Refuse unknown keys, nested dataclasses included, before OmegaConf does, so that the message has the file and line."""
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    for key, value in values.items():
        if key not in names:
            where = ".".join(path)
            raise UserError(
                f"{config.origin((*path, key))}: unknown key '{key}' in '{where}'{did_you_mean(key, names)}"
                f" (it has: {', '.join(names) or 'no options'})"
            )
        nested = _nested(hints[key])
        if nested is not None and isinstance(value, Mapping):
            _check_keys(nested, config, (*path, key), value)
        item = _item(hints[key])
        for number, each in enumerate(value if item is not None and isinstance(value, list) else ()):
            if item is not None and isinstance(each, Mapping):
                _check_keys(item, config, (*path, key, str(number)), each)


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text[0].lower() + text[1:]


@dataclasses.dataclass(frozen=True)
class Option:
    """One documented field of a schema."""

    name: str
    type: str
    default: str
    doc: str


@cache
def options_of(cls: type) -> tuple[Option, ...]:
    """The fields of a dataclass with their types, defaults and the docstring under each, for help texts and documentation."""
    hints = typing.get_type_hints(cls)
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        docs.update(_field_docs(base))
    found = []
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            default = _shown(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            default = _shown(field.default_factory())
        else:
            default = "(required)"
        hint = hints[field.name]
        found.append(Option(field.name, _type_name(hint), default, docs.get(field.name, "")))
    return tuple(found)


def _shown(value: Any) -> str:
    """A default as it would be written; of a nested section, what differs from its own defaults."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return repr(value)
    given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    return repr({f.name: given[f.name] for f in dataclasses.fields(value) if given[f.name] != f.default or f.metadata.get("variant")})


def _field_docs(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    docs = {}
    for statement, after in zip(body, body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            docs[statement.target.id] = " ".join(str(after.value.value).split())
    return docs
