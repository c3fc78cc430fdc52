"""What can be said of a plugin without importing it: its source is parsed, never run.

This is what keeps ``fw plugins list`` quick and harmless: a plugin that would crash, or import for ten seconds, is only read. What
cannot be seen in the source (an error deep inside an import) shows when the plugin is loaded; ``fw plugins list --import`` does that.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fw.registry.apis import FIRST, Apis
from fw.registry.discovery import ALLOWED, REGISTERED, Entry, allowed, entries


@dataclass(frozen=True)
class Listing:
    """A line of ``fw plugins list``. ``problem`` is empty where the plugin can be used; ``advice`` says what to know of one that can."""

    entry: Entry
    api: int | None
    summary: str
    problem: str
    advice: str = ""

    @property
    def available(self) -> bool:
        """Whether nothing speaks against using the plugin."""
        return not self.problem


def listing(kind: str, apis: Apis = FIRST) -> list[Listing]:
    """All plugins of a kind, broken ones included, each with the reason; ``apis`` are the versions of its contract the core speaks."""
    return [inspect(entry, apis) for entry in entries(kind)]


def inspect(entry: Entry, apis: Apis = FIRST) -> Listing:
    """One plugin. Whatever its source holds, the answer is a listing."""
    try:
        found = _inspect(entry)
        if not found.problem and found.api is not None:
            problem, advice = apis.problem(entry.kind, found.api, entry.distribution), apis.advice(entry.kind, found.api)
            return replace(found, problem=problem, advice=advice)
        return found
    except Exception as error:
        return Listing(entry, None, "", f"broken: its source cannot be made sense of ({type(error).__name__}: {error})")


def forbidden(entry: Entry) -> str:
    """Why a plugin that is not allowed cannot be used."""
    return f"is {entry.distribution}'s, whose plugins {ALLOWED} does not allow here; have '{entry.distribution}' added to it"


def _inspect(entry: Entry) -> Listing:
    if not allowed(entry):
        return Listing(entry, None, "", forbidden(entry))
    rivals = sorted({e.distribution for e in entries(entry.kind, entry.name) if allowed(e)})
    if len(rivals) > 1:
        return Listing(entry, None, "", f"registered by several distributions: {', '.join(rivals)}; uninstall all but one")
    if (cls := REGISTERED.get(entry)) is not None:
        return Listing(entry, cls.api, (cls.__doc__ or "").strip().partition("\n")[0], missing_packages(cls.packages))
    spec = find_spec(entry.module)
    if spec is None:
        return Listing(entry, None, "", f"module {entry.module} not found; reinstall {entry.distribution}")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return Listing(entry, None, "", "")
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except SyntaxError as error:
        return Listing(entry, None, "", f"broken: syntax error in {spec.origin}:{error.lineno}: {error.msg}")
    except OSError as error:
        return Listing(entry, None, "", f"broken: {error}")
    found = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == entry.attribute), None)
    if found is None and not _binds(tree, entry.attribute):
        reason = _import_problem(tree, entry) or f"broken: {entry.module} has no {entry.attribute}"
        return Listing(entry, None, "", reason)
    api: int | None = 1
    summary = ""
    packages: dict[str, str] = {}
    if found is not None:
        summary = (ast.get_docstring(found) or "").partition("\n")[0]
        api = _literal(found, "api", 1)
        packages = _literal(found, "packages", {})
        if not isinstance(packages, dict):
            return Listing(entry, None, summary, "broken: 'packages' is no mapping of import names to what pip installs")
    missing = missing_packages(packages)
    otherwise = _literal(found, "otherwise", "") if found is not None and missing else ""
    problem = f"{missing}{otherwise and f' {otherwise}'}" or _import_problem(tree, entry)
    return Listing(entry, api, summary, problem)


def declared(kind: str, attribute: str) -> dict[str, list[str]]:
    """What files may say → the plugins that declare it as a literal, read from their sources without importing them."""
    found: dict[str, list[str]] = {}
    for entry in filter(allowed, entries(kind)):
        for value in literal(entry, attribute, ()):
            found.setdefault(value, []).append(entry.name)
    return found


def literal(entry: Entry, name: str, default: Any) -> Any:
    """A class attribute of a plugin as its source has it, where it is a literal there; else ``default``. Nothing is imported."""
    if (cls := REGISTERED.get(entry)) is not None:
        return getattr(cls, name, default)
    spec = find_spec(entry.module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return default
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (SyntaxError, OSError, ValueError):
        return default
    found = next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == entry.attribute), None)
    return default if found is None else _literal(found, name, default)


def find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Like :func:`importlib.util.find_spec`, but parent packages are not imported either."""
    path: Sequence[str] | None = None
    spec = None
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        name = ".".join(parts[:length])
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path) if find else None
            if spec is not None:
                break
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and length < len(parts):
            return None
    return spec


def missing_packages(packages: dict[str, str]) -> str:
    """A sentence that names what is not installed and the pip command, or an empty string."""
    missing = {package: install for package, install in packages.items() if find_spec(package) is None}
    if not missing:
        return ""
    names = ", ".join(missing)
    command = " ".join(f'"{install}"' for install in dict.fromkeys(missing.values()))
    return f"needs {names}, which is not installed: pip install {command}"


def _literal(found: ast.ClassDef, name: str, default: Any) -> Any:
    for statement in found.body:
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [statement.target] if isinstance(statement, ast.AnnAssign) else []
        )
        value = getattr(statement, "value", None)
        if any(isinstance(t, ast.Name) and t.id == name for t in targets) and value is not None:
            try:
                return ast.literal_eval(value)
            except (ValueError, TypeError):
                return default
    return default


def _binds(tree: ast.Module, name: str) -> bool:
    """Whether the module could define ``name`` other than by a class statement (an import, an assignment, a star)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and any((a.asname or a.name.split(".")[0]) in (name, "*") for a in node.names):
            return True
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            return True
    return any(isinstance(n, ast.FunctionDef) and n.name in (name, "__getattr__") for n in tree.body)


def _import_problem(tree: ast.Module, entry: Entry) -> str:
    """What would certainly fail when the module is imported: an import of something absent, or a raise in the open."""
    for node in tree.body:
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        elif isinstance(node, ast.Raise):
            return f"broken: importing {entry.module} raises in line {node.lineno}: {ast.unparse(node)}"
        for module in modules:
            if importlib.util.find_spec(module.split(".")[0]) is None:
                return f"broken: imports {module}, which is not installed: pip install {module.split('.')[0]}"
    return ""
