"""Packages for plugins of one's own, which work and pass their tests before anything is changed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from fw import registry
from fw.errors import UserError

_TEMPLATES = Path(__file__).parent / "templates"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([_-][A-Za-z0-9]+)*")
_TRIED = {
    "kv_cache": "fw generate path/to/model kv_cache=$NAME",
    "logger": "fw train config.yaml 'logger=[csv, $NAME]'",
    "launcher": "fw train config.yaml launcher=$NAME launch.devices=2",
    "sharding": "fw train config.yaml sharding=$NAME launch.devices=2",
}
_PYPROJECT = """[build-system]
requires = ["setuptools>=68"]
build-backend = "setuptools.build_meta"

[project]
name = "$DISTRIBUTION"
version = "0.1.0"
description = "$SUMMARY"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["fw"]

[project.optional-dependencies]
test = ["pytest"]

[project.entry-points."fw.$KIND"]
$NAME = "$MODULE:$Class"

[tool.setuptools]
py-modules = ["$MODULE"]
"""
_README = """# $DISTRIBUTION

$SUMMARY

```bash
pip install -e '.[test]'
pytest                    # what every $KIND of fw must pass
fw plugins show $KIND $NAME
$TRIED
```

`$MODULE.py` is the plugin; `pyproject.toml` gives it its name. `fw plugins check $KIND $NAME` runs the same tests without this directory.
"""
_TEST = '''"""$Class passes what every $KIND plugin must."""

from fw import testing
from $MODULE import $Class


class Test$Class(testing.$SUITE):
    plugin = $Class
$MORE'''
_MORE = {"model": "    hf = False  # transformers knows no such model\n"}


@dataclass(frozen=True)
class Scaffold:
    """What was written, relative to ``directory``."""

    directory: Path
    files: tuple[str, ...]


def write(kind: str, name: str, directory: Path | None = None) -> Scaffold:
    """A package with a plugin.

    Args:
        kind: one of :data:`fw.kinds.KINDS`.
        directory: of the package itself; ``fw-NAME`` beside where one is, if left out.

    Raises:
        UserError: the name is no name or taken, or the directory is not empty.
    """
    if not _NAME.fullmatch(name):
        raise UserError(f"'{name}' is no name for a plugin; it is of letters, digits, '-' and '_', like my-{kind.replace('_', '-')}")
    if taken := registry.entries(kind, name):
        raise UserError(f"{kind} '{name}' is {taken[0].distribution}'s; take another name")
    plain = name.replace("-", "_").lower()
    made = directory or Path(f"fw-{plain.replace('_', '-')}")
    if made.exists() and (not made.is_dir() or any(made.iterdir())):
        raise UserError(f"{made} is there already, and no empty directory; name another with --dir")
    title = "".join(part[:1].upper() + part[1:] for part in re.split("[_-]", name))
    words = {
        "KIND": kind,
        "NAME": name,
        "MODULE": f"fw_{plain}",
        "DISTRIBUTION": f"fw-{plain.replace('_', '-')}",
        "Class": title,
        "SUITE": _suite(kind),
        "MORE": _MORE.get(kind, ""),
    }
    module = Template((_TEMPLATES / f"{kind}.txt").read_text()).substitute(words)
    words["SUMMARY"] = module.split('"""')[1].strip().partition("\n")[0]
    words["TRIED"] = Template(_TRIED.get(kind, "fw train config.yaml $KIND=$NAME")).substitute(words)
    files = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"{words['MODULE']}.py": "",
        f"test_{words['MODULE']}.py": _TEST,
    }
    made.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (made / file).write_text(Template(text).substitute(words) if text else module)
    return Scaffold(made, tuple(files))


def _suite(kind: str) -> str:
    """Its name in fw.testing, which needs pytest to be imported."""
    return "".join(part.capitalize() for part in kind.split("_")).replace("Kv", "KV") + "Suite"
