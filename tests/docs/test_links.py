"""Links of pages that are no part of the site, and of the site's that point out of it: to files and headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conftest import REPOSITORY

PAGES = [*(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_MADE = "reference/"
"""Below docs: pages that building the site makes."""


def _links(page: Path) -> list[str]:
    return [link for link in _LINK.findall(_FENCED.sub("", page.read_text())) if "://" not in link and not link.startswith("mailto:")]


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).strip() for heading in headings)
    return {re.sub(r"[ -]+", "-", heading) for heading in plain}


def test_there_are_links() -> None:
    assert sum(len(_links(page)) for page in PAGES) > 100 and _links(REPOSITORY / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if page.parent.name == "docs" and path.startswith(_MADE):
            continue  # tests/docs/test_site.py builds them
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in _anchors(target), f"{page.name}: {link}, of {sorted(_anchors(target))}"
