"""Runs beside one another: what was set otherwise, what came of it, and, on a page, their curves over each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

EXAMPLES = """examples:
  fw compare runs/one runs/other
  fw compare runs/* --html compared.html
  fw compare runs/one runs/other --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which, and in which form."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run directories, two at least")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a page, self-contained, with curves of losses and speed")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(options: argparse.Namespace) -> int:
    """Two tables."""
    from fw.errors import UserError
    from fw.training.run_comparison import MOST, compare, lines, page

    if not 2 <= len(options.runs) <= MOST:
        raise UserError(f"fw compare: {len(options.runs)} run{'s' * (len(options.runs) > 1)}; name 2 to {MOST}")
    found = compare(options.runs)
    if options.html is not None:
        try:
            options.html.write_text(page(found))
        except OSError as error:
            raise UserError(f"--html: {options.html} cannot be written: {error.strerror}") from None
    if options.json:
        told = {
            "runs": [str(each.directory) for each in found.runs],
            "states": [each.state for each in found.runs],
            "figures": found.figures,
            "memory": found.memory,
            "settings": found.settings,
        }
        print(json.dumps(told, indent=1))
        return 0
    came, otherwise = lines(found)
    head = ["", *(str(each.directory) for each in found.runs)]
    widths = [max(len(row[n]) for row in [head, *came, *otherwise]) for n in range(len(head))]

    def aligned(row: list[str]) -> str:
        return "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()

    print("\n".join([aligned(head), *map(aligned, came), "", "set otherwise:" if otherwise else "nothing was set otherwise"]))
    print("\n".join(map(aligned, otherwise)), end="\n" if otherwise else "")
    if options.html is not None:
        print(f"page: {options.html}")
    return 0
