"""The documentation: the site is built without a warning, and what pages tell to type works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import REPOSITORY, environment, fw as run_fw
from desk import desk_at

DOCS = REPOSITORY / "docs"
PAGES = ["concepts.md", "does-not-fit.md"]
_BLOCK = re.compile(r"^ *```bash\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMANDS = [
    (page, re.sub(r"\s+#\s.*$", "", line).strip())
    for page in PAGES
    for block in _BLOCK.findall((DOCS / page).read_text())
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Path]:
    with desk_at(tmp_path_factory.mktemp("desk"), cache) as place:
        yield place


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[command for _, command in COMMANDS])
def test_what_pages_tell_to_type_works(desk: Path, monkeypatch: pytest.MonkeyPatch, page: str, command: str) -> None:
    monkeypatch.chdir(desk)
    program, *words = shlex.split(command)
    assert program == "fw", f"{page}: {command}"
    run_fw(*words).ok()


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
