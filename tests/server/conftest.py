"""A tiny model whose tokens are bytes, so that it can say anything, with a chat template that knows tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import serving


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model, which has learnt nothing."""
    return serving.make_model(tmp_path_factory.mktemp("models") / "bytes")


@pytest.fixture(scope="session")
def server(directory: Path) -> Iterator[serving.Server]:
    """One that tests share which leave it as it was."""
    with serving.serving(directory, "inference.dtype=fp32", "--max-queue", "64") as made:
        yield made
