"""Every shipped configuration resolves."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import REPOSITORY
from fw.config import load
from fw.recipe import resolve

CONFIGS = sorted((REPOSITORY / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_resolves(config: Path):
    recipe = resolve(load(config))
    assert recipe.accumulation >= 1


def test_there_are_some():
    assert CONFIGS
