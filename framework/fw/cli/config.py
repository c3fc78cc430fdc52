"""Print a config as it resolves: what it extends, its overrides and every default in it."""

from __future__ import annotations

import argparse
import json

EXAMPLES = """examples:
  fw config configs/quickstart.yaml
  fw config configs/quickstart.yaml train.max_steps=50 --origin"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config, overrides, and what to show."""
    parser.add_argument("config", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--origin", action="store_true", help="say of each value which file and line, override or default it comes from")
    shown.add_argument("--unresolved", action="store_true", help="print the merged layers only: no defaults, interpolations as written")
    shown.add_argument("--json", action="store_true", help="print values and origins as JSON")


def run(options: argparse.Namespace) -> int:
    """Print."""
    from fw import config as configuration
    from fw.config import to_yaml
    from fw.recipe import current_world, resolve

    loaded = configuration.load(options.config, options.overrides)
    recipe = resolve(loaded, current_world())
    origins = recipe.origins()
    if options.unresolved:
        print(to_yaml(loaded.tree), end="")
    elif options.json:
        print(
            json.dumps(
                {".".join(path): {"value": _value(recipe.tree, path), "origin": str(origin)} for path, origin in origins.items()},
                indent=1,
            )
        )
    elif options.origin:
        shown = {path: f"{'.'.join(path)}: {_scalar(_value(recipe.tree, path))}" for path in origins}
        width = min(60, max(map(len, shown.values())))
        for path, origin in origins.items():
            print(f"{shown[path]:<{width}}  # {origin}")
    else:
        print(to_yaml(recipe.tree), end="")
    return 0


def _value(tree: object, path: tuple[str, ...]) -> object:
    for part in path:
        tree = tree[int(part)] if isinstance(tree, list) else tree[part]  # type: ignore[index]
    return tree


def _scalar(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
