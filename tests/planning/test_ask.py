"""`fw.plan`, `fw.fit`, `fw.profile` and `fw.train` from Python: what the command line says, as objects that show themselves."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import fw as package
from conftest import fw
from fw.planning.ask import is_model

SYNTHETIC = ["data={name: synthetic, vocab_size: 300, samples: 64}", "train.global_batch_size=8"]


def test_a_plan_is_the_command_lines(workspace: Path) -> None:
    found = package.plan("tiny.yaml", *SYNTHETIC)
    told = fw("plan", "tiny.yaml", *SYNTHETIC).ok()
    bytes_of = json.loads(fw("plan", "tiny.yaml", *SYNTHETIC, "--json").ok().out)["per_rank"]
    assert [_of_tensors(rank) for rank in found.as_json()["per_rank"]] == [_of_tensors(rank) for rank in bytes_of]
    assert repr(found).splitlines()[0] == told.out.splitlines()[0] == "tiny: 1 rank on cpu"
    assert package.plan("tiny.yaml", *SYNTHETIC).largest.at_peak == found.largest.at_peak, "again, in the same process"
    assert package.plan("tiny.yaml", *SYNTHETIC, "precision=bf16").largest.allocated_peak != found.largest.allocated_peak


def test_a_notebook_shows_the_page(workspace: Path) -> None:
    found = package.plan("tiny.yaml", *SYNTHETIC)
    (inner,) = _frames(found._repr_html_())
    assert inner == found.page() and "<h2>By module</h2>" in inner and "planned" in inner


def test_ranks_and_devices_that_are_not_here(workspace: Path) -> None:
    found = package.plan("tiny.yaml", *SYNTHETIC, "sharding=fsdp", world_size=4, device="h100-80gb")
    assert found.world_size == 4 and len(found.per_rank) == 4 and found.device == "h100-80gb"
    with pytest.raises(package.UserError, match="h10"):
        package.plan("tiny.yaml", device="h10")


def test_measured_beside_planned_and_both_twice(workspace: Path) -> None:
    """What the caller's process holds besides is not the run's."""
    own = torch.ones(1 << 20)
    measured = package.profile("tiny.yaml", *SYNTHETIC, steps=2, timed=1, trace="trace")
    again = package.profile("tiny.yaml", *SYNTHETIC, steps=2, timed=0)
    planned = package.plan("tiny.yaml", *SYNTHETIC)
    assert measured.how == again.how == "measured" and Path("trace/step-time.json").is_file()
    for found in (measured, again):
        assert found.largest.allocated_peak == pytest.approx(planned.largest.allocated_peak, abs=1024)
    assert own.sum() == 1 << 20
    assert "operators that take longest" in repr(measured) and "measured" in _frames(measured._repr_html_())[0]


def test_what_is_chosen_is_trained(workspace: Path) -> None:
    """As the command line would within the budget; the result says how it ended, and a notebook shows its report."""
    found = package.fit("tiny.yaml", *SYNTHETIC, "train.max_steps=3", "memory.budget=1GiB")
    assert found.fit.fits and found.memory.fits and repr(found).startswith("budget 1 GiB a rank")
    result = package.train(found.config)
    assert result.exit_code == 0 and repr(result).startswith("run: steps 3, loss 5.")
    assert _frames(result._repr_html_()) == [Path("run/report.html").read_text()]
    nothing = type(result)(1, Path("nowhere"))
    assert repr(nothing) == "nowhere: ended with exit code 1" and nothing._repr_html_() == f"<pre>{nothing!r}</pre>"


def test_a_model_that_generates_is_planned_too(workspace: Path) -> None:
    package.train("tiny.yaml", "train.max_steps=1", "train.save_every=1")
    found = package.plan("run", "inference.kv_budget=1MiB")
    assert "keys and values" in repr(found) and found._repr_html_().startswith("<pre>")
    for wrong, says in (({"world_size": 2}, "for training runs"), ({"device": "h300"}, "device 'h300' is not known")):
        with pytest.raises(package.UserError, match=says):
            package.plan("run", **wrong)


def _of_tensors(rank: dict[str, object]) -> dict[str, object]:
    """Without what the process itself has loaded."""
    return {key: value for key, value in rank.items() if key != "host_peak_bytes"}


@pytest.mark.parametrize(
    ("given", "model"),
    [("meta-llama/Llama-3.1-8B-Instruct", True), ("Qwen/Qwen3-0.6B", True), ("missing.yaml", False), ("tiny.yaml", False), (".", True)],
)
def test_what_names_a_model(workspace: Path, given: str, model: bool) -> None:
    assert is_model(given) == model


class _Frames(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "iframe":
            self.found.append(dict(attrs)["srcdoc"] or "")


def _frames(text: str) -> list[str]:
    parser = _Frames()
    parser.feed(text)
    return parser.found
