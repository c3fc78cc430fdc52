"""What `tools/bench check` compares, and with what."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools" / "benches"))  # where the benches find each other

import benchmarks
import check


def a_case(rate, date="2026-01-01"):
    way = {"tokens/s": [rate], "loss": [1.0], "resident": [90.0], "allocated": [50.0]}
    peer = {"tokens/s": [100.0, 300.0, 200.0], "loss": [1.0], "resident": [100.0], "allocated": [100.0]}
    versions = {"torch": "2"}
    return {"products": [400.0], "ways": {"fw": way, "another": peer}, "date": date, "commit": "abc", "versions": versions}


def test_ratios_by_the_best_peer():
    assert benchmarks.ratios(a_case(300.0)) == {"of its products": 0.75, "tokens/s": 1.5, "allocated": 0.5, "resident": 0.9}


def test_more_than_a_tenth_is_behind():
    before = {"tokens/s": 1.5, "allocated": 0.5, "of its products": 0.75}
    assert check.fallen(before, {"tokens/s": 1.36, "allocated": 0.545, "of its products": 0.8}) == []
    assert check.fallen(before, {"tokens/s": 1.34, "allocated": 0.56}) == [
        "of its products: not measured; the table has 0.75",
        "tokens/s: 1.34, where the table has 1.50",
        "allocated: 0.56, where the table has 0.50",
    ]


def test_figures_of_the_same_machine_else_the_last(monkeypatch):
    machines = {"one": {"case": a_case(1.0, "2026-03-01")}, "other": {"case": a_case(2.0, "2026-02-01")}}
    monkeypatch.setattr(benchmarks, "machine", lambda: "other")
    assert check.figures(machines) == ("other", machines["other"])
    monkeypatch.setattr(benchmarks, "machine", lambda: "a third")
    assert check.figures(machines) == ("one", machines["one"])


def test_each_machine_keeps_its_table(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmarks, "DOCS", tmp_path)
    monkeypatch.setattr(benchmarks, "_commit", lambda: "abc")
    for machine, rate in (("one", 300.0), ("other", 500.0), ("one", 400.0)):
        monkeypatch.setattr(benchmarks, "machine", lambda machine=machine: machine)
        benchmarks.keep("training", "a case", a_case(rate), {"versions": {"torch": "2"}})
    kept = json.loads((tmp_path / "benchmarks.json").read_text())["training"]
    assert {machine: cases["a case"]["ways"]["fw"]["tokens/s"] for machine, cases in kept.items()} == {"one": [400.0], "other": [500.0]}
    page = (tmp_path / "benchmarks.md").read_text()
    assert (
        page.index("### On one") < page.index("2.00 × the best peer's") < page.index("### On other") < page.index("2.50 × the best peer's")
    )
    assert "2.50" in (tmp_path / "benchmarks.svg").read_text()
