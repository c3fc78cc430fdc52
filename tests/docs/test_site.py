"""The documentation's site is built without a warning, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY, environment

DOCS = REPOSITORY / "docs"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=REPOSITORY, env={**environment(), "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    site = tmp_path / "site"
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
