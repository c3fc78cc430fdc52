"""Where a value came from: the line of a file, a command-line override, or a plugin's default."""

from __future__ import annotations

from dataclasses import dataclass, field

Path = tuple[str, ...]
"""A place in the config tree: ``("train", "max_steps")``."""


@dataclass(frozen=True)
class Origin:
    """``source`` is a file's path, ``override`` or ``default``; ``line`` counts from 1 and is 0 where there is none.

    ``raw`` is a scalar as it was written: an option that takes text gets ``007`` and not the number 7.
    """

    source: str
    line: int = 0
    text: str = ""
    raw: str | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        if self.line:
            return f"{self.source}:{self.line}"
        return f"{self.source} {self.text}".rstrip()


DEFAULT = Origin("default")


def override(text: str) -> Origin:
    """The origin of a value given as ``key=value`` on the command line."""
    return Origin("override", text=text)
