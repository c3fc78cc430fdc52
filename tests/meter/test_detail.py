"""Memory over time and by module, against sums by hand."""

from __future__ import annotations

import gc
import random

import torch

from fw.meter.account import UNNAMED, Block, History, Rules, Site
from fw.meter.allocations import allocations
from fw.meter.areas import STACK, areas
from fw.meter.detail import Timeline, by_module_at, most_by_module
from fw.meter.drawing import Area, Drawing, Line, Words
from fw.meter.step_memory import ACTIVATIONS, CATEGORIES, WEIGHTS

CPU = torch.device("cpu")


def short():
    """Weights of 100, two activations in two modules, of which the first goes, and something unnamed for a moment."""
    history = History(before=[Block(100, WEIGHTS)])
    history.mark("forward")
    first = history.came(Block(10, ACTIVATIONS, site=Site("layers.0", "forward")))
    history.came(Block(30, ACTIVATIONS, site=Site("layers.1", "forward")))
    history.mark("backward")
    passing = history.came(Block(5, site=Site("layers.1", "backward")))
    history.went(passing)
    history.went(first)
    return history


def test_a_short_step_point_by_point():
    timeline = Timeline.of(short())
    assert timeline.moved == [0, 10, 40, 45, 50, 60]
    assert timeline.by_category == {WEIGHTS: [100] * 6, ACTIVATIONS: [0, 10, 40, 40, 40, 30], UNNAMED: [0, 0, 0, 5, 0, 0]}
    assert timeline.total == [100, 110, 140, 145, 140, 130] and timeline.peak == 3
    assert timeline.phases == [(0, "forward"), (40, "backward")]
    assert Timeline.from_json(timeline.as_json()) == timeline


def test_modules_of_a_short_step():
    history = short()
    history.came(Block(50, ACTIVATIONS, site=Site("layers.0", "backward")))
    assert most_by_module(history, (ACTIVATIONS,)) == {"layers.0": 50, "layers.1": 30}
    assert by_module_at(history, (ACTIVATIONS,), "backward") == {"layers.0": 10, "layers.1": 30}
    assert [block.nbytes for block in history.left] == [30, 50]


def test_of_many_points_few_are_kept_and_the_highest_and_lowest_are_among_them():
    chance = random.Random(0)
    history, live, now, totals = History(), [], 0, [0]
    for _ in range(20_000):
        if live and chance.random() < 0.49:
            block = live.pop(chance.randrange(len(live)))
            history.went(block)
            now -= block.nbytes
        else:
            block = history.came(Block(chance.choice((8, 64, 4096, 10**6)), chance.choice(list(CATEGORIES))))
            live.append(block)
            now += block.nbytes
        totals.append(now)
    timeline = Timeline.of(history)
    assert 300 < len(timeline.moved) <= 600
    assert timeline.moved == sorted(timeline.moved)
    assert timeline.total[timeline.peak] == max(totals) == history.account().peak_bytes
    assert min(timeline.total) == 0 and timeline.total[-1] == now
    assert set(timeline.total) <= set(totals)
    parts = history.account().at_peak
    assert {category: line[timeline.peak] for category, line in timeline.by_category.items()} == parts


def test_areas_lie_on_each_other_and_reach_the_peak():
    timeline = Timeline.of(short())
    drawing = areas(timeline, "a step", budget=150)
    shown = [s for s in drawing.shapes if isinstance(s, Area) and len(s.points) == 2 * len(timeline.moved)]
    assert len(shown) == 3, "what stays is below"
    for below, above in zip(shown, shown[1:], strict=False):
        assert list(above.points[len(timeline.moved) :]) == list(reversed(below.points[: len(timeline.moved)]))
    axis, highest = shown[0].points[-1][1], min(y for _, y in shown[-1].points)
    lowest_weights = min(y for _, y in shown[0].points)
    assert abs((axis - highest) / (axis - lowest_weights) - 145 / 100) < 1e-9
    words = [s.text for s in drawing.shapes if isinstance(s, Words)]
    assert "peak 145 B" in words and "budget 150 B" in words and "forward" in words
    assert set(STACK) == set(CATEGORIES)


def test_a_far_budget_is_said_and_not_drawn():
    drawing = areas(Timeline.of(short()), "a step", budget=1450)
    assert any(isinstance(s, Words) and s.text == "a step · budget 1.42 KiB, 10 times the peak" for s in drawing.shapes)
    assert not any(isinstance(s, Line) and s.colour == "limit" for s in drawing.shapes)


def test_nothing_can_be_drawn_too():
    assert areas(Timeline.of(History()), "nothing").svg().startswith("<svg")


def test_a_png_shows_what_the_drawing_has():
    import io

    from PIL import Image

    drawing = Drawing(40, 20, "half")
    drawing.rectangle(0, 0, 20, 20, "#2364aa")
    image = Image.open(io.BytesIO(drawing.png()))
    assert image.size == (80, 40)
    assert image.getpixel((10, 20)) == (0x23, 0x64, 0xAA) and image.getpixel((70, 20)) == (255, 255, 255)


def inner():
    return torch.mul(torch.ones(1000), 2)


def test_blocks_know_site_and_line_and_the_bytes_are_the_same():
    def program(found):
        found.mark("forward")
        found.enter("layers.3")
        return inner()

    with allocations(CPU, Rules()) as plain:
        kept = program(plain)
    del kept
    with allocations(CPU, Rules(), lines=True) as found:
        kept = program(found)
    (block,) = found.history.left
    assert block.site == Site("layers.3", "forward") and str(block.site) == "forward of layers.3"
    assert block.nbytes == kept.nbytes and block.address == kept.data_ptr()
    assert block.line.endswith(f"test_detail.py:{inner.__code__.co_firstlineno + 1}, in inner")
    assert found.peak_bytes == plain.peak_bytes and not plain.history.left[0].line


def test_garbage_of_before_is_nobodys():
    """What only a collection finds is freed before anything is counted, not in between."""
    with allocations(CPU):  # torch's profiler knows the size of what was allocated while it recorded, and tells its end later
        cycle = [torch.empty(1000)]
        cycle.append(cycle)
    del cycle
    with allocations(CPU) as found:
        kept = torch.empty(10)
        gc.collect()
    assert found.left_bytes == found.peak_bytes == kept.nbytes
