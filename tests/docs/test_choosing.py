"""The figures of docs/choosing.md are those of the ladders that it links to."""

from __future__ import annotations

import re

import pytest

from conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
_FIGURES = re.compile(
    r"^\| (?P<name>[^|]+) \| \[(?P<before>[^\]]+)\]\((?P<page>[^)]+)\)[^|]* \| (\S+) → (\S+) \| (\S+) → (\S+) \|$", re.MULTILINE
)
STEPS = list(_FIGURES.finditer((DOCS / "choosing.md").read_text()))


def ladder(page: str) -> dict[str, tuple[str, str]]:
    """Bytes and speed, as they are written, by row."""
    header, _, *rows = [line.strip("| ").split(" | ") for line in (DOCS / page).read_text().splitlines() if line.startswith("|")]
    memory, speed = header.index("all"), header.index("tokens/s")
    return {row[0]: (row[memory], row[speed]) for row in rows}


def test_there_are_figures() -> None:
    rows = (DOCS / "choosing.md").read_text().split("## In numbers")[1].count("\n| ")
    assert len(STEPS) == rows - 2 >= 10
    assert {step["page"] for step in STEPS} == {"ladder.md", "ladder-lora.md", "ladder-qlora.md"}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step['page']} {step['name']}")
def test_they_are_the_ladders(step: re.Match[str]) -> None:
    rows = ladder(step["page"])
    before, after = rows[step["before"]], rows[step["name"]]
    assert step.groups()[3:] == (before[0], after[0], before[1], after[1])
