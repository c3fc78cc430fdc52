"""`fw compare`: figures, what was set otherwise, and a page that asks for nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from conftest import fw, metrics, summary
from fw.training.chart import smooth, thin

RUN = ("train.max_steps=4", "train.save_every=0", "train.val_every=2", "train.sample_tokens=0")


@pytest.fixture
def two(workspace: Path) -> None:
    fw("train", "tiny.yaml", *RUN, "memory.measure_step=2", "train.run_dir=one").ok()
    fw("train", "tiny.yaml", *RUN, "precision=bf16", "optimizer.lr=0.02", "train.run_dir=two&more").ok()


def test_figures_and_settings(two):
    found = json.loads(fw("compare", "one", "two&more", "--json").ok().out)
    assert found["runs"] == ["one", "two&more"] and found["states"] == ["finished", "finished"]
    for name in ("train_loss", "val_loss", "peak_memory_bytes", "tokens_per_s"):
        assert found["figures"][name] == [summary("one")[name], summary("two&more")[name]]
    assert found["settings"]["precision.name"] == ["fp32", "bf16"] and found["settings"]["optimizer.lr"][1] == 0.02
    assert "train.run_dir" not in found["settings"] and "train.max_steps" not in found["settings"]
    (measured,) = json.loads(Path("one/memory.json").read_text())["per_rank"]
    assert sum(found["memory"][0].values()) == measured["allocated_peak_bytes"] and found["memory"][1] is None
    told = fw("compare", "one", "two&more").ok().out
    assert re.search(r"^training loss +\d\.\d{4} +\d\.\d{4}$", told, re.M) and re.search(r"^precision.name +fp32 +bf16$", told, re.M)
    assert re.search(r"^  parameters +\d\S* KiB +–$", told, re.M) and "tokenizer" not in told
    assert "nothing was set otherwise" in fw("compare", "one", "one").ok().out


def test_the_page(two):
    fw("compare", "one", "two&more", "--html", "page.html").ok()
    page = Path("page.html").read_text()
    assert "two&amp;more" in page and "two&more" not in page.replace("two&amp;more", "")
    assert not re.search(r"(src|href)=|url\(|<script", page), "nothing is asked for"
    for number, run in enumerate(("one", "two&more")):
        (path, *_) = re.findall(rf"<polyline class='r{number}' points='([^']*)'", page)
        assert len(path.split()) == len([row for row in metrics(run) if row["loss"] is not None])
    assert page.count("<polyline") == 6, "training loss, validation loss and speed of each"


def test_what_cannot_be_compared(two):
    Path("three").mkdir()
    for words, said in (
        (["one"], "1 run; name 2 to 8"),
        (["one"] * 9, "9 runs; name 2 to 8"),
        (["one", "three"], "three holds no run"),
        (["one", "."], ". holds 2 runs; name one"),
        (["one", "four"], "four: no such directory"),
        (["one", "one", "--html", "no/where.html"], "--html: no/where.html cannot be written: No such file"),
    ):
        done = fw("compare", *words)
        assert done.code == 2 and said in done.err, done.err


def test_of_a_run_that_is_not_over_the_last_row_counts(two):
    text = Path("one/config.resolved.yaml").read_text()
    Path("one/config.resolved.yaml").write_text(text.replace("max_steps: 4", "max_steps: 9"))
    found = json.loads(fw("compare", "one", "two&more", "--json").ok().out)
    assert found["states"][0] == "not finished" and found["figures"]["train_loss"][0] == metrics("one")[-1]["loss"]
    assert found["figures"]["tokens"][0] is None


def test_curves_are_thinned_and_smoothed():
    points = [(float(n), float(n % 2)) for n in range(4001)]
    few = thin(points)
    assert len(few) <= 2001 and few[0] == points[0] and few[-1] == points[-1]
    assert smooth(points)[-1][1] == pytest.approx(0.5, abs=0.05) and smooth(points)[0] == points[0]
