"""Chromium without a window, driven over a pipe by its DevTools protocol (https://chromedevtools.github.io/devtools-protocol)."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from serving import PATIENCE_S, until

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, " ": 32}
_WRITES = {"Enter": "\r", " ": " "}


class Browser:
    """One page; ends with the ``with`` block.

    Attributes:
        console: what the page, or the browser about it, has said there: level and text.
        asked: addresses of everything that was asked for.
    """

    def __init__(self, width: int = 1280, height: int = 860) -> None:
        assert CHROMIUM is not None
        self.console: list[str] = []
        self.asked: list[str] = []
        self._profile = tempfile.mkdtemp(prefix="browser-")
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe"]
        # It reads from 3 and writes to 4, wherever the pipes are here.
        words = [CHROMIUM, *options, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", *words],
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)

    def call(self, method: str, **params: Any) -> Any:
        """The protocol's."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **({"sessionId": self._session} if self._session else {})}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._read(PATIENCE_S)).get("id") != self._count:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], seconds)[0], "the browser says nothing"
            got = os.read(self._from, 1 << 16)
            assert got, "the browser has ended"
            self._rest += got
        raw, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Log.entryAdded":
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Runtime.consoleAPICalled":
            self.console.append(f"{params['type']}: {[each.get('value') for each in params['args']]}")
        elif method == "Runtime.exceptionThrown":
            self.console.append(f"exception: {params['exceptionDetails']}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """A page, until it is there."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def get(self, script: str) -> Any:
        """What an expression of the page's comes to."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = PATIENCE_S) -> Any:
        """Likewise, as soon as it is true."""
        return until(lambda: self.get(script), seconds)

    def text(self, selector: str) -> str:
        """Of the first element."""
        found: str = self.get(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    def type(self, text: str) -> None:
        """Where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """A key, by its name."""
        event = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": _KEYS[key]}
        writes = {"text": _WRITES[key]} if key in _WRITES else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if writes else "rawKeyDown", **writes, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def picture(self, path: Path) -> None:
        """Of the window, as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
