"""Arguments that are written without quotes, by what a function's schema says of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fw.server.tool_text import JSON, PYTHON, Malformed, parsed


def converted(value: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value that is written without quotes, as the first of its schema's types that it can be; a string where there is none."""
    types = _types(schema, root)
    plain = value.strip()
    # The templates write None by Python's word or by JSON's.
    if plain in ("null", "None") and ("null" in types or (types and "string" not in types)):
        return None
    for kind in types:
        if kind == "string":
            return value
        if kind == "boolean" and plain.lower() in ("true", "false"):
            return plain.lower() == "true"
        if kind in ("integer", "number"):
            number = _number(plain)
            if number is not None and (kind == "number" or number == int(number)):
                return int(number) if kind == "integer" else number
        if kind in ("object", "array"):
            for syntax in (JSON, PYTHON):
                try:
                    found = parsed(plain, syntax)
                except Malformed:
                    continue
                if isinstance(found, dict if kind == "object" else list):
                    return found
    return value


def _number(text: str) -> int | float | None:
    if not JSON.word.fullmatch(text):
        return None
    try:
        number = json.loads(text)
    except ValueError:
        return None
    return number if type(number) is int or (type(number) is float and math.isfinite(number)) else None


def _types(schema: Any, root: Mapping[str, Any]) -> list[str]:
    """The types that a schema allows, in its order, through references and alternatives."""
    types: list[str] = []
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        own = one.get("type")
        types += [each for each in (own if isinstance(own, list) else [own]) if isinstance(each, str)]
        among = [each for key in ("anyOf", "oneOf", "allOf") if isinstance(one.get(key), list) for each in one[key]]
        waiting += [*reversed(among), _referred(one.get("$ref"), root)]
    return types


def _referred(reference: Any, root: Any) -> Any:
    """What stands where a reference points to in the same schema (RFC 6901)."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference.split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
