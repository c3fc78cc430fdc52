"""The matrix as text."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from fw.support.matrix import APART, Matrix, Status

_ORDER: tuple[Status, ...] = ("proven", "refused", "independent", "untested")


def counts(matrix: Matrix, one: str, other: str) -> Counter[Status]:
    """Of the pairs of two kinds."""
    return Counter(matrix.status((one, a), (other, b)) for a in matrix.kinds[one] for b in matrix.kinds[other])


def totals(matrix: Matrix) -> Counter[Status]:
    """Of all pairs of two kinds."""
    return sum((counts(matrix, one, other) for one, other in combinations(matrix.kinds, 2)), Counter())


def in_words(found: Counter[Status]) -> str:
    """Like "2760 pairs: 2600 proven, 160 refused"."""
    return f"{found.total()} pairs: {', '.join(f'{found[status]} {status}' for status in _ORDER if found[status])}"


_PAGE = """# Which plugins work together

Every pair of fw's own plugins stands in a run that was made, or is refused with a sentence. The runs are a covering array: few rows in
which every pair is. {training} train two steps of a tiny model on one or two ranks, save, and go on for a third from there; losses are
finite numbers. {generating} generate from a tiny model. `tools/matrix` makes all of them and writes this page; the tests make a tenth
of them again, and of the refusals. That numbers are right is what the tests of each plugin are for.

`fw plugins matrix KIND KIND` prints two kinds name by name. A plugin of another distribution says with `tested_with` what it has been run
with; a run with something else says once that nobody has.

**{total}.** Proven of how many that are not refused, and how many are:

{table}

- Presets of models (`llama3-8b`, …) are their architectures in other sizes. Names of `offload` are what goes where.
- *Independent*: the two never meet in a run. `kv_cache` is of generating alone, where there are `model`, `quantization` and `offload`.
{apart}
- `flash_attn` wants its package and a GPU, which the runs had not: it stands in no row.

## What is refused, and why

Each by the program, with the place in the config in front.

{refused}
"""


def page(matrix: Matrix) -> str:
    """docs/support-matrix.md."""
    kinds = list(matrix.kinds)
    table = ["| | " + " | ".join(kinds[1:]) + " |", "|---" * len(kinds) + "|"]
    for row, one in enumerate(kinds[:-1]):
        cells = [_cell(counts(matrix, one, other)) if column > row else "" for column, other in enumerate(kinds[1:], 1)]
        table.append(f"| {one} | " + " | ".join(cells) + " |")
    refused: dict[str, list[str]] = {}
    for each in matrix.refusals:
        refused.setdefault(each.sentence, []).append(" × ".join(f"{kind} `{name}`" for kind, name in sorted(each.of)))
    apart: dict[str, list[str]] = {}
    for (kind, name), why in APART.items():
        apart.setdefault(why, []).append(f"{kind} `{name}`")
    ordered = sorted((sorted(set(who)), sentence) for sentence, who in refused.items())
    return _PAGE.format(
        training=len(matrix.training.rows),
        generating=len(matrix.generating.rows),
        total=in_words(totals(matrix)),
        table="\n".join(table),
        apart="\n".join(f"- So are {' and '.join(names)}: each {why}." for why, names in apart.items()),
        refused="\n".join(f"- {'; '.join(who)}: *{sentence}*" for who, sentence in ordered),
    )


def _cell(found: Counter[Status]) -> str:
    possible = found["proven"] + found["untested"]
    told = [f"{found['proven']}/{possible}"] * bool(possible) + [f"{found['refused']} refused"] * bool(found["refused"])
    return ", ".join(told) or "–"
