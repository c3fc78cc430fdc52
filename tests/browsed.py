"""What is wrong with a page, as a browser shows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from browser import Browser

_FINDINGS = """(() => {
  const told = each => each.outerHTML.slice(0, 90), all = selector => [...document.querySelectorAll(selector)];
  const scrolls = each => { for (let e = each; e; e = e.parentElement) if (getComputedStyle(e).overflowX !== 'visible') return true; };
  const beyond = each => each.getBoundingClientRect().right > innerWidth + 1 && !scrolls(each.parentElement);
  const hidden = each => { const box = each.getBoundingClientRect(); return each.checkVisibility() && !(box.width > 0 && box.height > 0); };
  return {
    wide: document.documentElement.scrollWidth > innerWidth + 1 ? all('body *').filter(beyond).map(told).slice(0, 3) : [],
    blank: [...document.images].filter(each => !each.complete || !each.naturalWidth).map(each => each.src),
    unseen: all('main svg, main table, body > svg, body > table').filter(hidden).map(told),
    untitled: document.title ? [] : ['no title'],
  };
})()"""


def findings(browser: Browser, url: str, width: int) -> dict[str, list[str]]:
    """What a reader of the page would stumble over, by what it is; each empty where there is nothing.

    Args:
        url: of the page, whose own host alone it may ask for anything.
        width: of the window, in pixels.
    """
    browser.console.clear()
    browser.asked.clear()
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=860, deviceScaleFactor=1, mobile=False)
    browser.open(url)
    browser.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")
    found: dict[str, list[str]] = browser.get(_FINDINGS)
    own = url if url.startswith("file:") else "/".join(url.split("/")[:3])
    found["asked elsewhere"] = [each for each in browser.asked if not each.startswith((own, "data:", "about:", "blob:"))]
    found["console"] = [line for line in browser.console if line.startswith(("error", "exception", "assert", "warning"))]
    return {what: which for what, which in found.items() if which}


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *said: Any) -> None:
        """Nothing."""


@contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address at which a directory's files are to be had."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(directory)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
