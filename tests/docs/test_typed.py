"""All pages but docs/features.md, which has a file of its own, and docs/plugins.md: what they tell to type works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from desk import desk_at, furnish
from docs.typed import ELSEWHERE, PAGES, Typed, lines_of, type_at

OTHERS = [page for page in PAGES if page not in ("docs/features.md", "docs/plugins.md")]
TYPED = {*ELSEWHERE, *(typed.line for typed in lines_of("docs/features.md"))}
LINES = list({typed.line: typed for typed in lines_of(*OTHERS) if typed.line not in TYPED}.values())
"""Each once, on whatever page it stands."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Path]:
    with desk_at(tmp_path_factory.mktemp("desk"), cache) as place:
        furnish()
        yield place


@pytest.mark.parametrize("typed", LINES, ids=str)
def test_what_the_page_tells_to_type_works(desk: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.chdir(desk)
    type_at(desk, typed)


def test_what_is_not_typed_is_on_a_page() -> None:
    assert set(ELSEWHERE) <= {typed.line for typed in lines_of(*PAGES)}
