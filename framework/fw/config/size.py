"""Sizes as people write them (``24GiB``) and as code counts them (bytes)."""

from __future__ import annotations

import re

from fw.errors import UserError

_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    _UNITS[f"{_letter}iB"] = 1024**_power
    _UNITS[f"{_letter}B"] = 1000**_power


def parse_size(text: str | int) -> int:
    """Bytes in ``24GiB``, ``512 MiB``, ``1.5GB`` or a plain number.

    Raises:
        UserError: the text is no size.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]i?B|B)?\s*", text)
    if match is None:
        raise UserError(f"'{text}' is not a size; write it like 24GiB, 512MiB or 1500MB")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def format_size(size_bytes: float) -> str:
    """``1.5 GiB``: three significant digits in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1024 or unit == "TiB":
            return f"{size_bytes:.0f} {unit}" if unit == "B" or abs(size_bytes) >= 999.5 else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")
