"""``--html`` and ``--png`` of the verbs that tell a run's memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fw.meter.document import MemoryDocument
    from fw.planning.fit import Fit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where pictures go."""
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page: memory over one step, by module, component and rank")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write memory over one step as a picture")


def check(options: argparse.Namespace) -> None:
    """Refuse what cannot be written before there is anything to write.

    Raises:
        UserError: a directory does not exist.
    """
    from fw.errors import UserError

    for option, file in (("--html", options.html), ("--png", options.png)):
        if file is not None and not file.parent.is_dir():
            raise UserError(f"{option}: {file.parent} is not a directory")


def write(options: argparse.Namespace, document: MemoryDocument, how: str, fit: Fit | None = None) -> None:
    """Those that were asked for; ``how``: planned or measured; ``fit``: how it was chosen.

    Raises:
        UserError: a file cannot be written.
    """
    from fw.errors import UserError
    from fw.planning.page import page, picture

    try:
        if options.html is not None:
            options.html.write_text(page(document, how, fit), encoding="utf-8")
        if options.png is not None:
            options.png.write_bytes(picture(document, how).png())
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None
