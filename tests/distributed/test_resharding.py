"""A checkpoint of any division goes on under any other: the same bytes when written again, the same losses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from conftest import TINY, column, corpus_text
from distributed.ranks import run_ranks
from fw.checkpointing.comparing import compare
from fw.place import place

HERE = Path(__file__).parent
ZERO = {"zero 3 on 2": (2, ["sharding={name: zero, stage: 3}"])} if importlib.util.find_spec("deepspeed") else {}
CELLS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["sharding=single"]),
    "ddp on 2": (2, ["sharding=ddp"]),
    "fsdp on 2": (2, ["sharding=fsdp"]),
    "tensor 2": (2, ["sharding={name: fsdp, tensor: 2}"]),
    **ZERO,
    "fsdp on 4": (4, ["sharding=fsdp"]),
    "hsdp 2 x 2": (4, ["sharding={name: fsdp, replicate: 2}"]),
    "tensor 2 x fsdp 2": (4, ["sharding={name: fsdp, tensor: 2}"]),
}


@pytest.fixture(scope="module")
def passed_on(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each cell trains five steps; then each takes over from each. One launch per number of ranks for either."""
    directory = tmp_path_factory.mktemp("passed")
    (directory / "corpus.txt").write_text(corpus_text())
    (directory / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    sizes = sorted({ranks for ranks, _ in CELLS.values()})
    for size in sizes:
        cells = {name.replace(" ", "_"): options for name, (ranks, options) in CELLS.items() if ranks == size}
        run_ranks("pass_on.py", size, {"train": cells, "from": {}, "to": {}}, directory)
    sources = {name.replace(" ", "_"): f"{name.replace(' ', '_')}/checkpoints/step-00000005" for name in CELLS}
    for size in sizes:
        cells = {name.replace(" ", "_"): options for name, (ranks, options) in CELLS.items() if ranks == size}
        run_ranks("pass_on.py", size, {"train": {}, "from": sources, "to": cells}, directory)
    return directory


@pytest.mark.slow
def test_every_division_goes_on_from_every_other(passed_on, capsys):
    names = [name.replace(" ", "_") for name in CELLS]
    table, worst = {}, 0.0
    for before in names:
        source = passed_on / before / "checkpoints" / "step-00000005"
        expected = column(str(passed_on / f"{before}-{before}"), "loss")
        assert len(expected) == 5
        for after in names:
            found = compare(place(source), place(passed_on / f"{before}-{after}" / "again" / "step-00000005"))
            assert found.is_empty and found.identical == 84, (before, after, found)
            losses = column(str(passed_on / f"{before}-{after}"), "loss")
            apart = max(abs(a - b) / a for a, b in zip(losses, expected, strict=True))
            table[before, after] = apart
            worst = max(worst, apart)
            assert apart <= 1e-5, (before, after, losses, expected)
    with capsys.disabled():
        print(f"\n{len(table)} pairs, tensors identical, losses apart by at most {worst:.1e}")
        for before in names:
            print(f"{before:>18}", *(f"{table[before, after]:.0e}" for after in names))
