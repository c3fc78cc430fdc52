"""Whether fw has fallen behind docs/benchmarks.json: each case again, fw's fastest way beside the fastest peer of the table, as ratios.

    tools/bench check [--cases …] [--rounds 2] [--steps 12]

It is compared with figures of the same machine, where there are any, else with the last ones. Exit code 1 where a ratio is more than 10 %
worse than the table's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

import benchmarks
from peers import pythons
from training import WARM_UP, rounds
from training_cases import CASES

WORSE = 0.10
_LESS_IS_BETTER = ("allocated", "resident")


def compared(ways: Mapping[str, Any]) -> list[str]:
    """fw's fastest, and the fastest of the others, where there are any."""
    fastest = sorted(ways, key=lambda way: -median(ways[way]["tokens/s"]))
    chosen = [next((way for way in fastest if way.startswith("fw") is own), None) for own in (True, False)]
    return [way for way in chosen if way is not None]


def fallen(before: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    """Sentences on the ratios that are worse."""
    said = [f"{name}: not measured; the table has {before[name]:.2f}" for name in before if name not in now]
    for name, value in now.items():
        if name not in before:
            continue
        change = value / before[name] - 1
        if (change if name in _LESS_IS_BETTER else -change) > WORSE:
            said.append(f"{name}: {value:.2f}, where the table has {before[name]:.2f}")
    return said


def figures(machines: Mapping[str, Mapping[str, Any]]) -> tuple[str, Mapping[str, Any]]:
    """Whose they are, and by case: those of this machine, where it is in the table, else the last ones."""
    here = benchmarks.machine()
    return (here, machines[here]) if here in machines else benchmarks.latest(machines)


def main() -> None:
    """Measure and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    table = benchmarks.DOCS / "benchmarks.json"
    machine, kept = figures(json.loads(table.read_text())["training"]) if table.exists() else ("", {})
    parser.add_argument("--cases", nargs="+", default=list(kept), choices=list(kept), metavar="CASE", help=f"of: {'; '.join(kept)}")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--peers", nargs="+", default=pythons(), metavar="PYTHON")
    parser.add_argument("--busy", action="store_true", help="measure also where others use the processors")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps: {options.steps} is too small; the first {WARM_UP} warm up")
    if not kept:
        parser.error(f"{table}: there is none to compare with; tools/bench training --write makes it")
    worse = []
    print(f"compared with {machine}{'' if machine == benchmarks.machine() else ', another machine than this'}")
    for name in options.cases:
        ways = compared(kept[name]["ways"])
        before = benchmarks.ratios({**kept[name], "ways": {way: kept[name]["ways"][way] for way in ways}})
        now = benchmarks.ratios(rounds(name, CASES[name], ways, options))
        print(
            f"{name}: " + ", ".join(f"{ratio} {value:.2f} (table {before[ratio]:.2f})" for ratio, value in now.items() if ratio in before)
        )
        worse += [f"{name}: {sentence}" for sentence in fallen(before, now)]
    print("\n".join(["", "fallen behind:", *worse] if worse else ["", "nothing has fallen behind"]))
    sys.exit(1 if worse else 0)


if __name__ == "__main__":
    main()
