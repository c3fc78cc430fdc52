"""How far something that takes long has come, on stderr: a bar on a terminal; elsewhere a plain line now and then."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class Bar(tqdm):  # type: ignore[type-arg]
    """tqdm's, which says nothing where stderr is no terminal; this one then writes a line every ten seconds, ``verifying: 25%, 10 of
    40 files, 00:30 left``. Ranks but the first are silent, and what is over within the first second says nothing on a terminal either.

    Args:
        iterable: what is gone through; None where :meth:`update` is called.
        shown: whether anything is to be said at all.
        about: of :class:`tqdm.tqdm`: ``total``, ``desc``, ``unit``, ``unit_scale``, ``initial``.
    """

    def __init__(self, iterable: Any = None, *, shown: bool = True, **about: Any) -> None:
        self._on_terminal = sys.stderr.isatty()
        silent = not shown or os.environ.get("RANK", "0") != "0"
        if self._on_terminal:
            about = {"delay": 1, **about}
        else:
            every = SECONDS_BETWEEN_LINES
            about |= {"delay": every, "mininterval": every, "maxinterval": every, "miniters": 1}
        super().__init__(iterable, file=sys.stderr, leave=False, disable=silent, **about)

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """A line that can be written over on a terminal, and a whole one elsewhere."""
        if file.isatty():
            return tqdm.status_printer(file)

        def line(text: str) -> None:
            if text.strip():
                print(text.strip(), file=file, flush=True)

        return line

    def moveto(self, n: int) -> None:
        """Lines of several bars stand below one another on a terminal alone."""
        if self._on_terminal:
            super().moveto(n)

    def close(self) -> None:
        """Nothing is left of it on a terminal; elsewhere its lines are."""
        if not self._on_terminal:
            self.fp = io.StringIO()  # takes what would clear a bar
        super().close()

    def __str__(self) -> str:
        return super().__str__() if self._on_terminal else _line(self.format_dict)


def _line(about: Mapping[str, Any]) -> str:
    """From what tqdm knows."""

    def count(number: float) -> str:
        return f"{tqdm.format_sizeof(number)}" if about["unit_scale"] else f"{number:,}"

    done, total, unit = about["n"], about["total"], about["unit"]
    parts = [f"{done / total:.0%}, {count(done)} of {count(total)}{unit}" if total else f"{count(done)}{unit}"]
    if total and done > about["initial"]:
        parts.append(f"{tqdm.format_interval((total - done) * about['elapsed'] / (done - about['initial']))} left")
    else:
        parts.append(f"{tqdm.format_interval(about['elapsed'])} so far")
    told = ", ".join([*parts, *([str(about["postfix"])] if about["postfix"] else [])])
    return f"{about['prefix'].removesuffix(': ')}: {told}" if about["prefix"] else told
