"""docs/features.md: all that it tells to type works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from desk import desk_at, furnish
from docs.typed import ELSEWHERE, Typed, lines_of, type_at


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Path]:
    with desk_at(tmp_path_factory.mktemp("desk"), cache) as place:
        furnish()
        yield place


@pytest.mark.parametrize("typed", [line for line in lines_of("docs/features.md") if line.line not in ELSEWHERE], ids=str)
def test_what_the_page_tells_to_type_works(desk: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed) -> None:
    monkeypatch.chdir(desk)
    type_at(desk, typed)
