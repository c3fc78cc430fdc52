"""What `tools/bench accuracy` draws, counts and writes."""

from __future__ import annotations

import json
import random
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

from fw.config import load
from fw.errors import UserError
from fw.recipe import World, resolve

BENCHES = Path(__file__).parent.parent.parent / "tools" / "benches"
sys.path.append(str(BENCHES))  # where the benches find each other

import accuracy  # noqa: E402
from accuracy_page import dots, page  # noqa: E402
from accuracy_scatter import scatter  # noqa: E402
from accuracy_scores import score, summarise  # noqa: E402
from accuracy_space import AXES, LEAST_PARAMETERS, MOST_PARAMETERS, draw, redraw, shape  # noqa: E402

LOWERED = ("micro-batch", "length", "accumulation")
"""Axes whose values become less where a step would take too long."""
GIB = 1 << 30


def document(peaks: list[int], low: list[int] | None = None, phase: str = "backward", **most: int) -> dict:
    """Of as many ranks as peaks."""
    names = ("parameters", "gradients", "optimizer", "activations", "temporary", "communication", "buffers", "inputs", "kv", "other")
    sizes = {f"{name}_bytes": most.get(name, 0) for name in names}
    per_rank = [
        {
            "rank": rank,
            "allocated_peak_bytes": peak,
            "allocated_peak_low_bytes": low[rank] if low else peak,
            "reserved_peak_bytes": peak,
            "driver_peak_bytes": 0,
            "host_peak_bytes": 2 * peak,
            "peak_phase": phase,
            "components_at_peak": sizes,
            "components_max": sizes,
        }
        for rank, peak in enumerate(peaks)
    ]
    ends = {"config": "drawn", "device": "cpu", "world_size": len(peaks), "fits": None, "budget_bytes": None, "step_time_s": None}
    return {**ends, "per_rank": per_rank}


def entry(key: str, plan: dict, *profiles: dict, refused: tuple[str, ...] = ()) -> dict:
    drawn = draw(1, 60)[0]
    told = {"key": key, "seed": int(key.split("/")[0]), "label": f"model {key}", "choices": drawn.choices, "config": drawn.config}
    return {
        **told,
        "refused": list(refused),
        "commit": "abc",
        "date": "2026-01-01",
        "outcome": "measured",
        "plan": plan,
        "profiles": profiles,
    }


def test_a_seed_draws_the_same_and_another_one_other_configurations():
    assert draw(1, 60) == draw(1, 60) != draw(2, 60)
    assert redraw(draw(1, 60)[3]) == redraw(draw(1, 60)[3])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_value_of_every_axis_occurs_as_often_as_it_weighs(seed):
    drawn = draw(seed, 60)
    for axis in set(AXES) - set(LOWERED):
        found = Counter(each.choices[axis] for each in drawn)
        total = sum(value.weight for value in AXES[axis].values())
        for name, value in AXES[axis].items():
            assert found[name] >= 1 and abs(found[name] - value.weight / total * 60) < 2, (axis, found)
    sizes = sorted(each.parameters for each in drawn)
    assert sizes[0] < 1.5 * LEAST_PARAMETERS and sizes[-1] > 0.6 * MOST_PARAMETERS


def test_small_decks_deal_rare_values_too():
    number = max(map(len, AXES.values()))
    for axis in set(AXES) - set(LOWERED):
        assert {each.choices[axis] for each in draw(5, number)} == set(AXES[axis])


def test_what_is_drawn_are_configs_that_resolve_or_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resolved = 0
    for each in draw(1, 60) + [redraw(drawn) for drawn in draw(2, 60)[:20]]:
        Path("drawn.yaml").write_text(yaml.safe_dump(each.config))
        try:
            recipe = resolve(load("drawn.yaml"), World())
        except UserError:
            continue
        resolved += 1
        assert recipe.world_size == each.ranks
        assert recipe.accumulation == int(each.choices["accumulation"])
        tokens = recipe.train.global_batch_size * recipe.train.sequence_length
        least = 128 * recipe.replicas  # a row of each
        assert tokens * each.parameters < 1.5e11 or tokens == least
    assert resolved > 60


@pytest.mark.parametrize("size", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", list(AXES["model"]))
def test_shapes_have_about_the_parameters_asked_for(name, size, tmp_path):
    wanted = LEAST_PARAMETERS * (MOST_PARAMETERS / LEAST_PARAMETERS) ** size
    model, parameters = shape(name, 4096, size, random.Random(7))
    file = tmp_path / "shape.yaml"
    file.write_text(yaml.safe_dump({"model": model, "data": {"name": "synthetic", "vocab_size": 4096}}))
    recipe = resolve(load(file), World())
    with torch.device("meta"):
        built = recipe.model.build(4096, 128, recipe.attention)
    real = sum(parameter.numel() for parameter in built.parameters())
    assert real == pytest.approx(parameters, rel=0.1) and parameters == pytest.approx(wanted, rel=0.3)


def test_a_redraw_keeps_the_sharding():
    for drawn in draw(1, 60):
        again = redraw(drawn)
        assert (again.choices["sharding"], again.key, again.attempt) == (drawn.choices["sharding"], drawn.key, 1)
        assert again.config != drawn.config != redraw(again).config != again.config


def test_a_score_sets_the_highest_measurement_against_the_upper_end():
    plan = document([900, 1000], low=[800, 950], parameters=100, activations=500)
    runs = [document([890, 960], parameters=100, activations=480), document([900, 980], parameters=100, activations=520)]
    found = score("x", plan, runs)
    assert (found.ranks, found.measured, found.low, found.high, found.within) == (2, 980, 950, 1000, True)
    assert found.error == pytest.approx(20 / 980)
    assert found.off == () and found.component == "activations" and abs(found.component_error) == pytest.approx(20 / 980)
    assert not score("x", plan, [*runs, document([900, 1002], parameters=100)]).within, "above the range"
    assert not score("x", plan, [*runs, document([900, 948], parameters=100)]).within, "below the range"
    assert score("x", plan, [document([900, 1000.5], parameters=101)]).off == ("parameters",)
    with pytest.raises(ValueError, match="2 ranks were planned"):
        score("x", plan, [document([1000])])


def test_a_summary_counts():
    exact = score("a", document([1000], parameters=10), [document([1000], parameters=10)])
    under = score("b", document([900], phase="step"), [document([1000])])
    over = score("c", document([1020], optimizer=7), [document([1000])])
    found = summarise([exact, under, over])
    assert (found.number, found.median, found.underestimate) == (3, pytest.approx(0.02), pytest.approx(0.1))
    assert found.percentile95 == pytest.approx(0.02 + 0.9 * 0.08)
    assert found.overestimate == pytest.approx(0.02) and found.median_above == 0
    assert (found.within, found.phases, found.exact) == tuple(pytest.approx(n / 3) for n in (1, 2, 2))


def test_the_page_says_what_was_found_and_what_was_not(tmp_path):
    one = entry("1/0", document([GIB]), document([GIB]), refused=("a does not work with b",))
    two = entry("1/1", document([GIB] * 2, low=[GIB // 2] * 2, gradients=8), *[document([int(GIB * 1.25), GIB], phase="step")] * 5)
    bad = {
        **entry("2/0", {}),
        "outcome": "failed",
        "failure": "fw profile ended with 1: no luck",
        "refused": ["a does not work with b"],
    }
    lines = page([one, two, bad]).splitlines()
    assert "| model 1/0 | 1 | 1 GiB | 1 GiB | +0.000% | yes | backward | exact | none |" in lines
    row = "| model 1/1 | 2 | 1.25 GiB | 512 MiB to 1 GiB | -20.000% | **no** | step, not backward | **gradients** | gradients +0.000% |"
    assert row in lines
    assert "| worst underestimate | none | 20.000% |" in lines and "| configurations | 1 | 1 |" in lines
    assert "- seed 2: model 2/0: fw profile ended with 1: no luck" in lines
    assert "- 2 × a does not work with b" in lines
    assert any("5 times for several" in line for line in lines)
    assert "| sharding | single 2, ddp 2 0" in page([one, two, bad])


def test_the_picture_has_a_mark_for_each_where_its_error_is():
    big = entry("1/1", document([2 * GIB] * 2), document([4 * GIB] * 2))
    found = dots([entry("1/0", document([GIB]), document([GIB])), big])
    assert {name: [round(error, 6) for _, _, error in group] for name, group in found.items()} == {
        "one process": [0.0],
        "several ranks": [-0.5],
    }
    picture = ElementTree.fromstring(scatter(found, "errors"))
    marks = [mark for mark in picture.iter() if mark.tag.endswith("circle") and "fill-opacity" in mark.attrib]
    (zero,) = (line for line in picture.iter() if line.attrib.get("class") == "zero")
    first, second = marks
    assert float(first.attrib["cy"]) == float(zero.attrib["y1"]) < float(second.attrib["cy"])
    assert float(first.attrib["cx"]) < float(second.attrib["cx"]) and first.attrib["fill"] != second.attrib["fill"]
    with pytest.raises(ValueError, match="nothing to draw"):
        scatter({}, "errors")


class Fake:
    """Stands in for ``fw`` in processes; every third plan is refused, and one profile fails."""

    def __init__(self) -> None:
        self.plans, self.profiles = 0, 0

    def __call__(self, verb: str, file: str, flag: str, *more: str, directory: Path, timeout: float) -> accuracy.Ended:
        assert more == (() if verb == "plan" else ("--steps", "2", "--timed", "0"))
        assert flag == "--json" and yaml.safe_load(Path(file).read_text())["data"]["name"] == "synthetic"
        ranks = yaml.safe_load(Path(file).read_text())["launch"].get("devices", 1)
        if verb == "plan":
            self.plans += 1
            if self.plans % 3 == 0:
                return accuracy.Ended(2, "", f"some warning\nfw: error: {file}:7: it cannot be\n")
        else:
            self.profiles += 1
            if self.profiles == 2:
                return accuracy.Ended(1, "", "fw: error: it went wrong\n")
        return accuracy.Ended(0, json.dumps(document([GIB] * ranks)), "")


def test_a_bench_counts_refusals_lists_failures_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    def results() -> dict[str, dict]:
        return json.loads((tmp_path / "accuracy.json").read_text())

    def outcomes() -> Counter[str]:
        return Counter(each["outcome"] for each in results().values())

    fake = Fake()
    monkeypatch.setattr(accuracy, "fw", fake)
    words = ["--seed", "4", "--only", "single", "--out", str(tmp_path)]
    accuracy.main([*words, "--limit", "4"])
    page = (tmp_path / "accuracy.md").read_text()
    assert (fake.plans, fake.profiles) == (5, 4) and "- 1 × it cannot be" in page and "fw profile ended with 1: it went wrong" in page
    before = results()
    assert outcomes() == {"measured": 3, "failed": 1}
    accuracy.main([*words, "--limit", "5"])
    assert fake.profiles == 5 and len(results()) == 5 and before.items() <= results().items()
    accuracy.main([*words, "--limit", "5", "--again"])
    assert fake.profiles == 6 and outcomes() == {"measured": 5}
    accuracy.main(["--seed", "4", "--only", "several", "--limit", "1", "--repeats", "3", "--out", str(tmp_path)])
    assert fake.profiles == 9
    capsys.readouterr()


def test_what_does_not_fit_the_machine_is_not_measured(tmp_path, monkeypatch, capsys):
    huge = iter([accuracy.Ended(0, json.dumps(document([1 << 50])), "")])
    small = accuracy.Ended(0, json.dumps(document([GIB])), "")
    monkeypatch.setattr(accuracy, "fw", lambda verb, *words, **more: next(huge, small) if verb == "plan" else small)
    accuracy.main(["--only", "single", "--limit", "1", "--out", str(tmp_path)])
    assert "- 1 × too large for this machine" in (tmp_path / "accuracy.md").read_text()
    capsys.readouterr()


def test_a_process_that_takes_too_long_is_ended_with_its_children(tmp_path):
    ended = accuracy.fw("plan", "nothing.yaml", directory=tmp_path / "x", timeout=0.01)
    assert ended.code is None and ended.sentence() == "not finished after 0 s"
    ended = accuracy.fw("plan", "nothing.yaml", directory=tmp_path / "x", timeout=60)
    assert ended.code == 2 and "nothing.yaml" in ended.sentence() and not ended.sentence().startswith("fw: error")
