"""The documentation's site is built without a warning, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from browsed import findings, served
from browser import CHROMIUM, Browser
from conftest import REPOSITORY, environment

DOCS = REPOSITORY / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built, without a warning."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    site = tmp_path_factory.mktemp("docs") / "site"
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(words, cwd=REPOSITORY, env={**environment(), "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return site


def test_it_holds_every_page_and_what_is_made_of_the_program(site: Path) -> None:
    for page, holds in {
        "reference/config/index.html": "gradient_clip_norm",
        "reference/plugins/index.html": "reshard_after_forward",
        "reference/python/index.html": "world_size",
        "reference/configs/index.html": "llama3-405b",
    }.items():
        assert holds in (site / page).read_text(), page
    for page in DOCS.glob("*.md"):
        built = site / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        assert built.is_file(), page
        outside = re.findall(r"<(?:script|link)[^>]+(?:src|href)=.?https?://", built.read_text())
        assert not [found for found in outside if "canonical" not in found], f"{page.name} fetches from elsewhere"


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_is_wrong_with_its_pages_in_a_browser(site: Path, width: int) -> None:
    pages = sorted(str(page.parent.relative_to(site)) for page in site.rglob("index.html"))
    assert len(pages) > 25
    with served(site) as url, Browser() as browser:
        wrong = {page: found for page in pages if (found := findings(browser, f"{url}/{page}/".replace("/./", "/"), width))}
    assert wrong == {}
