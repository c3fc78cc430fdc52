"""The commands at the head of every config in configs/: `fw plan` says that it fits the device that is named there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import REPOSITORY, fw as run_fw
from desk import desk_at

CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
PLANS = [
    (config.stem, line.removeprefix("#").strip())
    for config in CONFIGS
    for line in config.read_text().splitlines()
    if line.startswith("#") and "fw plan " in line
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Path]:
    with desk_at(tmp_path_factory.mktemp("desk"), cache) as place:
        yield place


def test_every_config_but_the_first_names_a_plan() -> None:
    with_plans = {name for name, _ in PLANS}
    assert {config.stem for config in CONFIGS} - with_plans <= {"quickstart", "chat"}
    assert all("--device" in command for _, command in PLANS)


@pytest.mark.parametrize(("name", "command"), PLANS, ids=[name for name, _ in PLANS])
def test_it_fits_what_it_is_for(desk: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str) -> None:
    monkeypatch.chdir(desk)
    found = run_fw(*shlex.split(command)[1:], "--json", "--strict", timeout=600).ok()
    planned = json.loads(found.out)
    assert planned["fits"] and planned["device"] == shlex.split(command)[-1]


@pytest.mark.parametrize("config", [each for each in CONFIGS if each.stem != "quickstart"], ids=lambda path: path.stem)
def test_nearly_every_knob_says_what_it_does(config: Path) -> None:
    lines = [line for line in config.read_text().splitlines() if re.match(r"^ *[a-z_]+: \S", line) and not line.startswith("extends")]
    assert sum("#" in line for line in lines) >= 0.8 * len(lines), config.name
