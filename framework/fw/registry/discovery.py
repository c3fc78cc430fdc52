"""Which plugins there are: read from the metadata of distributions, nothing imported, and those that code has registered."""

from __future__ import annotations

import importlib.metadata
import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

GROUP_PREFIX = "fw."
OWN = "fw"
"""Distribution of fw's own plugins."""
ALLOWED = "FW_PLUGINS"
"""Variable that names the distributions, with commas between them, whose plugins may be used beside fw's own; unset for all."""


@dataclass(frozen=True)
class Entry:
    """One registered name. ``target`` is ``module:Class``; where none is installed, ``distribution`` is the file or the module."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str

    @property
    def module(self) -> str:
        """The module that holds the plugin."""
        return self.target.partition(":")[0].strip()

    @property
    def attribute(self) -> str:
        """The class's name in its module."""
        return self.target.partition(":")[2].partition("[")[0].strip()


REGISTERED: dict[Entry, type[Any]] = {}
"""Plugins that are not installed, and their classes (:mod:`fw.registry.registering`)."""


@cache
def _all() -> tuple[Entry, ...]:
    found: dict[Entry, None] = {}  # a distribution that is on sys.path twice is one distribution
    for distribution in importlib.metadata.distributions():
        if not (points := [point for point in distribution.entry_points if point.group.startswith(GROUP_PREFIX)]):
            continue
        told = distribution.metadata  # which is read anew each time it is asked for
        for point in points:
            kind = point.group.removeprefix(GROUP_PREFIX)
            found[Entry(kind, point.name, point.value, told["Name"] or "unknown", told["Version"])] = None
    return tuple(sorted(found, key=lambda e: (e.kind, e.name, e.distribution)))


def entries(kind: str, name: str | None = None) -> tuple[Entry, ...]:
    """Every registration of ``kind``, duplicates included; only those called ``name`` where one is given."""
    return tuple(e for e in (*_all(), *REGISTERED) if e.kind == kind and name in (None, e.name))


def from_elsewhere(kind: str, name: str) -> str | None:
    """The distribution that a plugin was installed with, where that is not fw itself; None of a plugin of a file or of code, too."""
    found = [entry.distribution for entry in _all() if (entry.kind, entry.name) == (kind, name)]
    return found[0] if found and OWN not in found else None


def kinds_found() -> tuple[str, ...]:
    """The kinds for which any plugin is registered, sorted."""
    return tuple(sorted({e.kind for e in (*_all(), *REGISTERED)}))


def allowed(entry: Entry) -> bool:
    """Whether its plugin may be used on this machine."""
    if (named := os.environ.get(ALLOWED)) is None or entry in REGISTERED:  # where it is set, nothing is registered
        return True
    return _normal(entry.distribution) in {"fw", *(_normal(name) for name in named.split(","))}


def _normal(name: str) -> str:
    """A distribution's name, however it is written (https://packaging.python.org/en/latest/specifications/name-normalization/)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
