"""The matrix as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product

from fw.support.causes import CAUSES, Cause, Whose, cause_of
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


def pairs(matrix: Matrix, kinds: Sequence[str] = ()) -> list[dict[str, str | None]]:
    """Of two kinds, or of each two there are: the pair, its status and, where it is refused, the sentence, why, and where that is from."""
    found = []
    for one, other in combinations(kinds or matrix.kinds, 2):
        for a, b in product(matrix.kinds[one], matrix.kinds[other]):
            pair = (one, a), (other, b)
            status = matrix.status(*pair)
            sentence = matrix.refusal(*pair) if status == "refused" else None
            cause = cause_of(sentence or "")
            why, source = (None, None) if cause is None else (cause.why, cause.source)
            found.append({one: a, other: b, "status": status, "sentence": sentence, "cause": why, "source": source})
    return found


MARKS: dict[Status, str] = {"proven": "+", "refused": "x", "independent": "·", "untested": "?"}
_WORDS = {"proven": "a run had both", "refused": "see below", "independent": "they never meet in a run", "untested": "nobody knows"}


def overview(matrix: Matrix) -> str:
    """How many pairs of each two kinds are refused, and the totals."""
    kinds = list(matrix.kinds)
    lines = ["refused pairs of two kinds; + where every other one is proven and none is refused, · where the two never meet", ""]
    lines.append(" " * 16 + "".join(f"{column:4}" for column in range(1, len(kinds))))
    for row, one in enumerate(kinds):
        found = [counts(matrix, other, one) for other in kinds[:row]]
        lines.append(f"{row + 1:2} {one:13}" + "".join(f"{_short(each):>4}" for each in found))
    total = in_words(totals(matrix))
    return "\n".join([*lines, "", f"{total}, by {matrix.runs} runs", "fw plugins matrix KIND KIND prints two kinds name by name"])


def _short(found: Counter[Status]) -> str:
    if found["untested"]:
        return MARKS["untested"]
    return str(found["refused"] or MARKS["proven" if found["proven"] else "independent"])


def two_kinds(matrix: Matrix, one: str, other: str) -> str:
    """Name by name, then what is refused and why."""
    if len("".join(matrix.kinds[one])) < len("".join(matrix.kinds[other])):
        one, other = other, one
    rows, columns = matrix.kinds[one], matrix.kinds[other]
    width = max(map(len, [*rows, f"{one} \\ {other}"])) + 2
    lines = [f"{one} \\ {other}".ljust(width) + "  ".join(columns)]
    for a in rows:
        marks = [MARKS[matrix.status((one, a), (other, b))].ljust(len(b)) for b in columns]
        lines.append((a.ljust(width) + "  ".join(marks)).rstrip())
    refused: dict[str, list[str]] = {}
    for pair in pairs(matrix, (one, other)):
        if pair["sentence"] is not None:
            refused.setdefault(pair["sentence"], []).append(f"{one} '{pair[one]}' with {other} '{pair[other]}'")
    found = counts(matrix, one, other)
    lines += ["", *(f"{MARKS[status]} {status}: {_WORDS[status]}" for status in _ORDER if found[status])]
    for sentence, of in refused.items():
        cause = cause_of(sentence)
        why = [cause.why, *filter(None, [cause.source])] if cause else []
        lines += ["", *(f"x {pair}" for pair in of), *(f"  {line}" for line in (sentence, *why))]
    return "\n".join([*lines, "", in_words(found)])


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
- `zero, stage 3` with an optimizer in files wants libaio and its header (Debian: libaio-dev), which the runs had.
- `flash_attn` wants its package and a GPU, which the runs had not: it stands in no row.

## What is refused, and why

Each by the program, with the place in the config in front. What another project is like is looked up in its code by a test, so that a
refusal goes when its cause does.

{refused}
"""

_WHOSE: dict[Whose, str] = {
    "upstream": "Because of another project",
    "method": "Because of what the method is",
    "fw": "Because of fw, which could do otherwise",
}


def page(matrix: Matrix) -> str:
    """docs/support-matrix.md."""
    kinds = list(matrix.kinds)
    table = ["| | " + " | ".join(kinds[1:]) + " |", "|---" * len(kinds) + "|"]
    for row, one in enumerate(kinds[:-1]):
        cells = [_cell(counts(matrix, one, other)) if column > row else "" for column, other in enumerate(kinds[1:], 1)]
        table.append(f"| {one} | " + " | ".join(cells) + " |")
    apart: dict[str, list[str]] = {}
    for (kind, name), why in APART.items():
        apart.setdefault(why, []).append(f"{kind} `{name}`")
    return _PAGE.format(
        training=len(matrix.training.rows),
        generating=len(matrix.generating.rows),
        total=in_words(totals(matrix)),
        table="\n".join(table),
        apart="\n".join(f"- So are {' and '.join(names)}: each {why}." for why, names in apart.items()),
        refused="\n\n".join(_refused(matrix, whose) for whose in _WHOSE),
    )


def _refused(matrix: Matrix, whose: Whose) -> str:
    """By causes, each with what is refused for it."""
    refused: dict[Cause, dict[str, set[str]]] = {cause: {} for cause in CAUSES if cause.whose == whose}
    for runs, when in ((matrix.training, ""), (matrix.generating, ", generating")):
        for each in runs.refusals:
            if (cause := cause_of(each.sentence)) in refused:
                who = " × ".join(f"{kind} `{name}`" for kind, name in sorted(each.of))
                refused[cause].setdefault(each.sentence, set()).add(f"{who}{when}")
    lines = [f"### {_WHOSE[whose]}", ""]
    for cause, sentences in refused.items():
        lines.append(f"- {cause.why}" + (f" ([source]({cause.source}))" if cause.source else ""))
        lines += sorted(f"    - {'; '.join(sorted(of))}: *{sentence}*" for sentence, of in sentences.items())
    return "\n".join(lines)


def _cell(found: Counter[Status]) -> str:
    possible = found["proven"] + found["untested"]
    told = [f"{found['proven']}/{possible}"] * bool(possible) + [f"{found['refused']} refused"] * bool(found["refused"])
    return ", ".join(told) or "–"
