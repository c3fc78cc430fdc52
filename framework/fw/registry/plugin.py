"""The base class of every plugin, and the rules between plugins as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Requires:
    """This plugin works only together with one of ``names`` of ``kind``; ``because`` is a clause that ends a sentence."""

    kind: str
    names: tuple[str, ...]
    because: str


@dataclass(frozen=True)
class Conflicts:
    """This plugin does not work together with any of ``names`` of ``kind``; ``because`` is a clause that ends a sentence."""

    kind: str
    names: tuple[str, ...]
    because: str


@dataclass
class NoOptions:
    """The schema of a plugin that has no options."""


class Plugin:
    """What every plugin has, whatever its kind.

    A plugin is a class registered under the entry-point group ``fw.<kind>``. It is built with its filled-in ``Config`` and keeps it as
    ``self.config``. Its first docstring line is what ``fw plugins list`` prints.
    """

    kind: ClassVar[str]
    """Set by the kind's contract, not by the plugin."""

    api: ClassVar[int] = 1
    """The version of the kind's contract the plugin was written for."""
    Config: ClassVar[type] = NoOptions
    """A dataclass: fields typed, each with a docstring that gives unit and effect on memory. Schema, help and documentation in one."""
    packages: ClassVar[dict[str, str]] = {}
    """Import name → what to ``pip install`` for it, for packages fw itself does not depend on. Checked before the import."""
    otherwise: ClassVar[str] = ""
    """What else there is to do or to know where a package is missing; ends the sentence that gives the pip command."""
    requires: ClassVar[tuple[Requires, ...]] = ()
    conflicts: ClassVar[tuple[Conflicts, ...]] = ()

    tested_with: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Kind → names that it has been tested with, besides those that the tests of its kind use; a run with others says so once."""

    not_options: ClassVar[Mapping[str, str]] = {}
    """Options that one might look for here in vain, and a sentence on each with the way out."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def differs_because(self) -> str:
        """Why it gives other bits from run to run though torch is asked for the same ones, as a clause with what to do; empty where it
        does not. ``train.deterministic`` refuses it."""
        return ""
