"""Pages that fw writes, in a browser: they ask nobody for anything, everything on them is seen, also on a narrow screen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from yaml import safe_dump

import fw
from browsed import findings
from browser import CHROMIUM, Browser
from conftest import TINY, corpus_text, fw as run_fw, metrics

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Path]:
    """Two runs, and a page of every kind."""
    place = tmp_path_factory.mktemp("pages")
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    patch.setenv("FW_CACHE", str(cache))
    try:
        Path("corpus.txt").write_text(corpus_text())
        Path("tiny.yaml").write_text(safe_dump(TINY, sort_keys=False))
        for name, rate in {"one": "1e-3", "two": "3e-3"}.items():
            fw.train("tiny.yaml", "train.max_steps=4", "train.val_every=2", f"optimizer.lr={rate}", f"train.run_dir={name}")
        run_fw("compare", "one", "two", "--html", "compare.html").ok()
        run_fw("plan", "tiny.yaml", "sharding=fsdp", "--world-size", "2", "--html", "plan.html").ok()
        run_fw("profile", "tiny.yaml", "--steps", "1", "--timed", "0", "--html", "profile.html").ok()
        yield place
    finally:
        patch.undo()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page", ["one/report.html", "compare.html", "plan.html", "profile.html"])
def test_nothing_is_wrong_with(place: Path, browser: Browser, page: str, width: int) -> None:
    assert findings(browser, (place / page).as_uri(), width) == {}
    assert browser.get("document.querySelectorAll('svg').length") >= 1


def test_a_report_says_the_runs_last_loss(place: Path, browser: Browser) -> None:
    browser.open((place / "one/report.html").as_uri())
    assert f"{metrics(place / 'one')[-1]['loss']:.4f}" in re.sub(r"\s+", " ", browser.text("body"))


def test_what_is_wrong_is_found(tmp_path: Path, browser: Browser) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<html><body><div style='width: 3000px'>x</div><img src='gone.png'><svg width=0 height=0></svg>"
        "<script>fetch('http://127.0.0.1:9/'); console.error('no')</script></body></html>"
    )
    found = findings(browser, bad.as_uri(), 800)
    assert set(found) >= {"wide", "blank", "unseen", "untitled", "console"}
    assert "http://127.0.0.1:9/" in found["asked elsewhere"]
