"""List plugins of all distributions without importing them, describe one, begin one, and run the tests of its kind."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from fw.errors import UserError, did_you_mean

EXAMPLES = """examples:
  fw plugins list
  fw plugins list sharding --json
  fw plugins show optimizer adamw
  fw plugins new optimizer my-sgd --dir my-sgd
  fw plugins check optimizer adamw
  fw plugins check data chat data.files=[chats.jsonl] data.tokenizer=models/base
  fw plugins matrix peft quantization"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="what is installed, and whether it can be used")
    listing.add_argument("kind", nargs="?", metavar="KIND", help="only this kind")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.add_argument(
        "--import",
        dest="imported",
        action="store_true",
        help="import each plugin too, which shows what only then fails",
    )
    show = actions.add_parser("show", help="options of a plugin, with types, defaults and documentation")
    show.add_argument("kind", metavar="KIND")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--json", action="store_true", help="print JSON")

    new = actions.add_parser("new", help="write a package with a plugin that works, and its tests")
    new.add_argument("kind", metavar="KIND")
    new.add_argument("name", metavar="NAME", help="what configs will call it")
    new.add_argument("--dir", metavar="D", type=Path, help="the package's root; fw-NAME where left out")
    check = actions.add_parser("check", help="run the tests that every plugin of a kind must pass")
    check.add_argument("kind", nargs="?", metavar="KIND", help="only this kind; all plugins beside fw's own where left out")
    check.add_argument("name", nargs="?", metavar="NAME", help="only this plugin")
    check.add_argument(
        "overrides", nargs="*", metavar="key=value", help="KIND.OPTION=… where its defaults do not do, and what else a run with it needs"
    )
    matrix = actions.add_parser("matrix", help="which of fw's own plugins work together, and why others do not")
    matrix.add_argument("kinds", nargs="*", metavar="KIND", help="two kinds, of which every pair is told; numbers of all where left out")
    matrix.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Dispatch."""
    return {"list": _list, "show": _show, "new": _new, "check": _check, "matrix": _matrix}[options.action](options)


def _new(options: argparse.Namespace) -> int:
    from fw import scaffold
    from fw.kinds import KINDS

    _known(options.kind, KINDS)
    made = scaffold.write(options.kind, options.name, options.dir)
    print("\n".join(str(made.directory / file) for file in made.files))
    print(f"next: cd {made.directory} && pip install -e '.[test]' && pytest")
    return 0


def _check(options: argparse.Namespace) -> int:
    from fw.kinds import KINDS

    if options.kind is not None:
        _known(options.kind, KINDS)
    try:
        from fw.testing.check import check
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise UserError("fw plugins check needs pytest, which is not installed: pip install pytest") from None
    from fw.config import Config, overridden

    return check(options.kind, options.name, overridden(Config("check", {}, {}), options.overrides).tree)


def _matrix(options: argparse.Namespace) -> int:
    from fw.support import telling
    from fw.support.matrix import Matrix

    matrix = Matrix.read()
    for kind in options.kinds:
        _known(kind, matrix.kinds)
    if len(set(options.kinds)) not in (0, 2) or len(options.kinds) > 2:
        raise UserError("fw plugins matrix takes two different kinds, or none for the numbers of all")
    if options.json:
        print(json.dumps(telling.pairs(matrix, options.kinds), indent=1, ensure_ascii=False))
    else:
        print(telling.two_kinds(matrix, *options.kinds) if options.kinds else telling.overview(matrix))
    return 0


def _list(options: argparse.Namespace) -> int:
    from fw import registry
    from fw.kinds import KINDS

    kinds = dict.fromkeys([*KINDS, *registry.kinds_found()])
    if options.kind is not None:
        _known(options.kind, kinds)
        kinds = {options.kind: None}
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        for line in registry.listing(kind, KINDS[kind].apis) if kind in KINDS else registry.listing(kind):
            problem = line.problem or (_import_problem(kind, line.entry.name) if options.imported else "")
            if kind not in KINDS:
                problem = problem or f"fw has no kind '{kind}'{did_you_mean(kind, KINDS)}"
            entry = line.entry
            rows.append(
                {
                    "kind": kind,
                    "name": entry.name,
                    "distribution": entry.distribution,
                    "version": entry.version,
                    "api": line.api,
                    "available": not problem,
                    "problem": problem,
                    "advice": line.advice,
                    "summary": line.summary,
                }
            )
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    table = [("KIND", "NAME", "DISTRIBUTION", "API", "AVAILABLE", "")]
    for row in rows:
        state = "yes" if row["available"] else "no"
        text = (row["advice"] or row["summary"]) if row["available"] else row["problem"]
        table.append((row["kind"], row["name"], f"{row['distribution']} {row['version']}", str(row["api"] or "?"), state, text))
    widths = [max(len(cells[column]) for cells in table) for column in range(5)]
    for cells in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, [*widths, 0], strict=True)).rstrip())
    return 0


def _show(options: argparse.Namespace) -> int:
    from fw import registry
    from fw.config import options_of
    from fw.kinds import KINDS, plugin_class

    _known(options.kind, KINDS)
    cls = plugin_class(KINDS[options.kind].load_contract(), options.name)
    entry = registry.entry_of(options.kind, options.name)
    fields = options_of(cls.Config)
    rules = [("requires", rule) for rule in cls.requires] + [("conflicts with", rule) for rule in cls.conflicts]
    doc = " ".join((cls.__doc__ or "").split())
    if options.json:
        described = {
            "kind": options.kind,
            "name": options.name,
            "distribution": entry.distribution,
            "version": entry.version,
            "api": cls.api,
            "doc": doc,
            "options": [dataclasses.asdict(field) for field in fields],
            "rules": [{"rule": word, **dataclasses.asdict(rule)} for word, rule in rules],
        }
        print(json.dumps(described, indent=1))
        return 0
    print(f"{options.kind} '{options.name}'  ({entry.distribution} {entry.version}, api {cls.api}, {entry.target})\n\n{doc}\n")
    for word, rule in rules:
        print(f"{word} {rule.kind} {', '.join(rule.names)}: {rule.because}")
    for field in fields:
        print(f"  {field.name}: {field.type} = {field.default}\n      {field.doc}")
    if not fields:
        print("  no options")
    return 0


def _known(kind: str, kinds: object) -> None:
    names = list(kinds)  # type: ignore[call-overload]
    if kind not in names:
        raise UserError(f"unknown kind '{kind}'{did_you_mean(kind, names)} (there are: {', '.join(names)})")


def _import_problem(kind: str, name: str) -> str:
    from fw.errors import FwError
    from fw.kinds import KINDS, plugin_class

    if kind not in KINDS:
        return ""
    try:
        plugin_class(KINDS[kind].load_contract(), name)
    except FwError as error:
        return str(error)
    return ""
