"""Capabilities as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Probe:
    """How it shows that a plugin can do something: a run with ``sections`` besides has the losses of the same run without.

    Attributes:
        sections: of a config.
        before: sections that the run without has, too.
        tolerance: relative, of losses; None where they may be others, as long as they are finite.
    """

    sections: Mapping[str, Any]
    before: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float | None = 1e-5
