"""Pages as a notebook shows them."""

from __future__ import annotations

import html

_HEIGHT = 640


def framed(page: str) -> str:
    """A whole page inside another, which keeps its styles and scripts to itself."""
    return f"<iframe srcdoc='{html.escape(page)}' style='width:100%;height:{_HEIGHT}px;border:0' sandbox='allow-scripts'></iframe>"


def plain(text: str) -> str:
    """Text in columns."""
    return f"<pre>{html.escape(text)}</pre>"
