"""The model that a run in this process has trained, as the run leaves it."""

from __future__ import annotations

import pytest

from fw.assemble import Assembly, assemble
from fw.training import module


def assemblies(monkeypatch: pytest.MonkeyPatch) -> list[Assembly]:
    """Grows by what each run of one rank assembles from here on."""
    found: list[Assembly] = []

    def kept(*given: object) -> Assembly:
        found.append(assemble(*given))  # type: ignore[arg-type]  # passed on
        return found[-1]

    monkeypatch.setattr(module, "assemble", kept)
    return found
