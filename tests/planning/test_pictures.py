"""Pages and pictures of a plan: what they are drawn from equals the document, plain PyTorch and sums by hand."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conftest import fw
from fw.meter.step_memory import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from fw.planning.plan import plan
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention

SYNTHETIC = ["data={name: synthetic, vocab_size: 300, samples: 64}", "train.global_batch_size=8"]


def numbers(model, of):
    return sum(p.numel() for name, p in model.named_parameters() if of(name))


@pytest.mark.parametrize("ranks", [1, 2])
def test_modules_keep_what_plain_pytorch_counts(workspace: Path, ranks: int) -> None:
    document = plan("tiny.yaml", *SYNTHETIC, *(["sharding=fsdp", "launch.devices=2"] if ranks == 2 else []))
    detail = document.detail
    model = Llama(LlamaConfig(64, 2, 4, 2, intermediate_size=128), 300, 64, SDPAttention(None))
    assert detail.parameters == numbers(model, lambda name: True)
    expected = {
        "embedding": numbers(model, lambda name: name.startswith("embed")),
        "layers.0": numbers(model, lambda name: name.startswith("layers.0.")),
        "layers.1": numbers(model, lambda name: name.startswith("layers.1.")),
        "head": numbers(model, lambda name: not name.startswith(("embed", "layers."))),
    }
    assert list(detail.modules) == list(expected)
    for name, count in expected.items():
        kept = detail.modules[name]
        assert kept[WEIGHTS] == kept[GRADIENTS] == 4 * count // ranks, name
        assert 0 < kept[OPTIMIZER] - 8 * count // ranks <= 4 * 9, "two moments, and a count of steps for each parameter"
    assert sum(kept[WEIGHTS] for kept in detail.modules.values()) == document.largest.at_peak["parameters"]
    assert sum(kept[OPTIMIZER] for kept in detail.modules.values()) == document.largest.at_peak["optimizer"]
    assert detail.timeline.total[detail.timeline.peak] == max(detail.timeline.total) == document.largest.allocated_peak


def test_a_block_more_keeps_what_a_block_keeps(workspace: Path) -> None:
    two, three = (plan("tiny.yaml", *SYNTHETIC, f"model.num_hidden_layers={layers}") for layers in (2, 3))
    more = three.largest.at_peak["activations"] - two.largest.at_peak["activations"]
    assert three.detail.modules["layers.1"][ACTIVATIONS] == more > 0
    whole = sum(kept[ACTIVATIONS] for kept in two.detail.modules.values())
    losses = 4 * 8 * 16  # of tokens, which are no module's
    assert whole == pytest.approx(two.largest.at_peak["activations"], abs=losses + 64)


class _Page(HTMLParser):
    """Its cells, row by row, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.fetched: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for key, value in attrs if key in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("td", "th")
        if self._cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._cell = False

    def handle_data(self, data):
        if self._cell:
            self.rows[-1][-1] += data


def test_a_page_has_everything_and_fetches_nothing(workspace: Path) -> None:
    overrides = [*SYNTHETIC, "memory.budget=8MiB"]
    done = fw("plan", "tiny.yaml", *overrides, "--json", "--html", "page.html", "--png", "step.png").ok()
    document = json.loads(done.out)
    assert list(document) == ["config", "device", "world_size", "fits", "budget_bytes", "per_rank", "step_time_s"]
    text = Path("page.html").read_text()
    page = _Page(text)
    assert not page.fetched and not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    for drawn in re.findall(r"<svg.*?</svg>", text, flags=re.S):
        ElementTree.fromstring(drawn)
    rows = {row[0]: row[1:] for row in page.rows if len(row) > 2}
    (rank,) = document["per_rank"]
    counted = rank["components_max"]["parameters_bytes"] / 4
    assert rows["optimizer"][-1] == f"{rank['components_max']['optimizer_bytes'] / counted:.2f}" == "8.00"
    assert rows["total"][1] == f"{rank['allocated_peak_bytes'] / counted:.2f}"
    formula = [float(rows[name][1]) for name in ("model", "activations", "gradients", "optimizer", "buffer")]
    assert sum(formula) == pytest.approx(float(rows["total"][1]), abs=0.03)
    timeline = json.loads(re.search(r"id='timeline'>(.*?)</script>", text)[1])
    total = [sum(line[point] for line in timeline["by_category"].values()) for point in range(len(timeline["moved"]))]
    assert max(total) == rank["allocated_peak_bytes"]
    assert [name for _, name in timeline["phases"]][:2] == ["forward", "backward"]
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_nobody_can_write_is_refused_before_anything_runs(workspace: Path) -> None:
    for verb in ("plan", "profile"):
        done = fw(verb, "tiny.yaml", "--png", "nowhere/step.png")
        assert done.code == 2 and done.err.strip() == "fw: error: --png: nowhere is not a directory"
