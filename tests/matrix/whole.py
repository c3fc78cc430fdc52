"""All of the matrix: runs in which every pair of fw's own plugins is, and which pairs are refused, into fw/support/matrix.json.

    tools/matrix [--fresh]

What is there already stays, unless it is said to be made afresh. A row that ends in another way than well or with a sentence is a defect:
it is told, and the program ends with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import warm_python
from fw.support.matrix import FILE, Level, Matrix, Refusal, Runs
from fw.support.telling import page
from matrix.covering import NoRow, all_pairs, cover, pairs_of
from matrix.levels import GENERATING, PARTS, TRIPLES, prepare
from matrix.running import Outcome, Run, cores, generate, reason, train

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "support-matrix.md"
Levels = frozenset[Level]


class Making:
    """Runs of one sort, until every pair is known.

    Args:
        parts: names by kind.
        first: what some rows are to have together.
        known: rows and refusals of before.
    """

    def __init__(
        self, run: Run, parts: Mapping[str, Collection[str]], first: Sequence[Sequence[tuple[str, str]]], known: Runs | None
    ) -> None:
        self._run, self._first = run, first
        self.kinds = {part: list(names) for part, names in parts.items()}
        before = [] if known is None else known.rows
        self.rows = [row for row in before if all(row.get(part) in names for part, names in self.kinds.items())]
        self.refusals: dict[Levels, str] = {} if known is None else {each.of: each.sentence for each in known.refusals}
        self.defects: list[str] = []

    @property
    def made(self) -> Runs:
        """So far."""
        return Runs(self.kinds, self.rows, [Refusal(of, sentence) for of, sentence in self.refusals.items()])

    def left(self) -> tuple[set[Levels], list[Sequence[Level]]]:
        """Pairs, and what some row is to have together, that no row has and nothing refuses."""
        proven = {pair for row in self.rows for pair in pairs_of(row)}
        first = [some for some in self._first if not any(of <= set(some) for of in self.refusals)]
        first = [some for some in first if not any(set(some) <= set(row.items()) for row in self.rows)]
        return {pair for pair in all_pairs(self.kinds) - proven if not any(of <= pair for of in self.refusals)}, first

    def go_on(self, files: Path, place: Path, keep: Callable[[], object]) -> bool:
        """As many rows as pairs are left for; False where none were, or something went wrong. ``keep`` is called whenever more is known."""
        wanted, first = self.left()
        if not (wanted or first) or self.defects:
            return False
        try:
            rows = cover(self.kinds, set(self.refusals), first, wanted, seed=len(self.rows) + len(self.refusals))
        except NoRow as none:  # what stands beside these by itself must be what refuses them
            outcome = self._run(dict(none.levels), files, Path(tempfile.mkdtemp(dir=place)))
            if outcome.refused:
                self.refusals[none.levels] = outcome.sentence
                print(f"  {sorted(none.levels)}: {outcome.sentence}", flush=True)
            else:
                self.defects.append(f"{none}, and alone it ends with {outcome.code}\n{outcome.told[-3000:]}")
            keep()
            return True
        print(f"{len(wanted)} pairs, {len(rows)} rows", flush=True)

        def ran(row: Mapping[str, str]) -> Outcome:
            return self._run(row, files, Path(tempfile.mkdtemp(dir=place)))

        with ThreadPoolExecutor(cores()) as pool:
            outcomes = list(pool.map(ran, rows))
        self.rows += [row for row, outcome in zip(rows, outcomes, strict=True) if outcome.code == 0]
        keep()
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.code and not outcome.refused:
                self.defects.append(f"{json.dumps(row)}\n{outcome.told[-3000:]}")
            elif outcome.code and not any(of <= set(row.items()) for of in self.refusals):
                of = reason(self._run, row, outcome, files, Path(tempfile.mkdtemp(dir=place)), self.refusals)
                self.refusals[of] = outcome.sentence
                keep()
                print(f"  {sorted(of)}: {outcome.sentence}", flush=True)
        return True


def main() -> int:
    """Run rows until every pair is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="forget what is known")
    options = parser.parse_args()
    warm_python.install()
    known = None if options.fresh or not FILE.exists() else Matrix.read()
    training = Making(train, PARTS, TRIPLES, None if known is None else known.training)
    generating = Making(generate, GENERATING, (), None if known is None else known.generating)
    with tempfile.TemporaryDirectory(prefix="fw-matrix-") as name, warm_python.loading_environment():
        place = Path(name)
        (files := place / "files").mkdir()
        prepare(files)
        for making in (training, generating):
            while making.go_on(files, place, lambda: Matrix(training.made, generating.made).write()):
                pass
    matrix = Matrix(training.made, generating.made)
    matrix.write()
    PAGE.write_text(page(matrix))
    defects = training.defects + generating.defects
    print(*defects, sep="\n\n")
    print(f"{matrix.runs} runs, {len(matrix.refusals)} refusals, {len(defects)} defects")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
