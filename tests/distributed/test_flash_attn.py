"""flash-attn's plugin under every way to divide attention, with a stand-in for the package, against scores written out on one rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conftest import column
from distributed.ranks import run_ranks

SHARED = ["train.max_steps=3", "data.isolate_documents=true", "model.num_hidden_layers=4"]
WAYS = {
    "single": ["sharding=single"],
    "ddp": ["sharding=ddp", "activation=sqrt"],
    "fsdp": ["sharding=fsdp", "activation=selective"],
    "tensor": ["sharding=fsdp", "sharding.tensor=2", "activation=full"],
    "context": ["sharding=fsdp", "sharding.context=2", "activation={name: auto, budget: 400KiB}"],
    "zero": ["sharding=zero", "sharding.stage=3"],
}


def test_losses_are_those_of_scores_written_out(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = workspace / "path" / "flash_attn"
    package.mkdir(parents=True)
    tests = Path(__file__).parent.parent
    package.joinpath("__init__.py").write_text(
        f"import sys\nsys.path.append({str(tests)!r})\nfrom models.flash_attn_stand_in import *\n__version__ = '2.8.3'\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH")))))
    asked = {name: [*words, *SHARED, "attention=flash_attn"] for name, words in WAYS.items()}
    one = {"eager": ["sharding=single", *SHARED, "attention=eager"], "single": asked.pop("single")}
    came: dict[str, str] = {}
    for ranks, runs in ((1, one), (2, asked)):
        came |= json.loads(run_ranks("flash_attn_in_turn.py", ranks, runs).stdout.splitlines()[-1])
    assert came == dict.fromkeys(["eager", *WAYS], "")
    for name in WAYS:
        assert column(name, "loss") == pytest.approx(column("eager", "loss"), rel=2e-5), name
