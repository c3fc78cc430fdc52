"""List runs, the one that was written to last first: state, step, last losses, and whether the newest checkpoint is whole."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fw.errors import EXIT_FAILED, EXIT_OK

if TYPE_CHECKING:
    from fw.training.past_runs import PastRun

EXAMPLES = """examples:
  fw runs
  fw runs /shared/runs --verify     # every byte of the newest checkpoints; exit code 1 if one is damaged
  fw runs --json"""

_COLUMNS = ("run", "state", "step", "loss", "val loss", "tokens/s", "newest checkpoint", "written")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to look, and how closely."""
    parser.add_argument("directories", nargs="*", metavar="DIR", type=Path, help="runs, or directories of runs (runs)")
    parser.add_argument("--verify", action="store_true", help="read the newest checkpoints whole, and compare with what was written")
    parser.add_argument("--json", action="store_true", help="print JSON, sizes in bytes, times in seconds since 1970")


def run(options: argparse.Namespace) -> int:
    """A line each; 1 where a checkpoint is damaged."""
    from fw.bars import Bar
    from fw.training.past_runs import past_runs

    roots = options.directories or ([Path("runs")] if Path("runs").is_dir() else [])
    with Bar(desc="reading checkpoints", unit="B", unit_scale=True, shown=options.verify) as bar:
        found = past_runs(roots, options.verify, bar.update)
    damaged = [each.checkpoint for each in found if each.checkpoint is not None and each.checkpoint.problems]
    if options.json:
        told = [{**dataclasses.asdict(each), "directory": str(each.directory)} for each in found]
        print(json.dumps(told, indent=1))
    elif not found:
        print(f"fw: no run in {', '.join(map(str, options.directories)) or 'runs'}", file=sys.stderr)
    else:
        print("\n".join(_table([_COLUMNS, *(_line(each, options.verify) for each in found)])))
        for each in found:
            if each.said:
                print(f"{each.directory}: {each.said}")
        for checkpoint in damaged:
            for problem in checkpoint.problems:
                print(f"fw: warning: {checkpoint.place}: {problem}", file=sys.stderr)
    return EXIT_FAILED if damaged else EXIT_OK


def _line(run: PastRun, verified: bool) -> tuple[str, ...]:
    from fw.config import format_size

    step = "" if run.step is None else f"{run.step}/{run.max_steps}" if run.max_steps is not None else str(run.step)
    if (checkpoint := run.checkpoint) is None:
        newest = "none"
    else:
        health = "DAMAGED" if checkpoint.problems else "whole" if verified else "complete"
        newest = f"{health}, {format_size(checkpoint.size_bytes)}" if checkpoint.step is None else ""
        newest = newest or f"step {checkpoint.step}, {health}, {format_size(checkpoint.size_bytes)}"
    losses = ["" if each is None else f"{each:.4f}" for each in (run.loss, run.val_loss)]
    rate = "" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}"
    when = datetime.fromtimestamp(run.changed).strftime("%Y-%m-%d %H:%M")
    return (str(run.directory), run.state, step, *losses, rate, newest, when)


def _table(lines: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = {2, 3, 4, 5}
    cells = (
        [cell.rjust(w) if n in right else cell.ljust(w) for n, (cell, w) in enumerate(zip(line, widths, strict=True))] for line in lines
    )
    return ["  ".join(each).rstrip() for each in cells]
