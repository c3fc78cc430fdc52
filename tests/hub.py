"""A hub of this machine: repositories that are directories, over the part of the Hugging Face hub's HTTP interface that its client reads by
(https://huggingface.co/docs/hub/api). Every request is kept."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

_API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+?)(?:/(?P<what>revision|tree|paths-info)/(?P<revision>[^/]+)(?P<path>/.*)?)?"
)
_FILE = re.compile(r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


class Hub:
    """``root/models/org/name`` and ``root/datasets/org/name``, each at one commit, which its files' contents make."""

    def __init__(self, root: Path, url: str) -> None:
        self.root, self.url = root, url
        self.asked: list[str] = []
        """Method and path of each request."""

    def environment(self, home: Path) -> dict[str, str]:
        """What tells a process of this hub, and of nothing in anybody's cache."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def commit(self, kind: str, name: str) -> str:
        return _digest(*(part for path in self.files(kind, name) for part in (path.name.encode(), path.read_bytes())))

    def files(self, kind: str, name: str) -> list[Path]:
        return sorted(path for path in (self.root / kind / name).rglob("*") if path.is_file())


def _digest(*parts: bytes) -> str:
    found = hashlib.sha1()
    for part in parts:
        found.update(part)
    return found.hexdigest()


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_HEAD(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()))

    def _answer(self, form: dict[str, list[str]]) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if found := _API.fullmatch(path):
            self._of_api(found, form)
        elif found := _FILE.fullmatch(path):
            self._of_file(found)
        else:
            self._refuse("EntryNotFound")

    def _directory(self, found: re.Match[str], kind: str) -> Path | None:
        """Of the repository, at the commit that is asked for; else what is wrong has been said."""
        directory = self.hub.root / kind / found["name"]
        if not directory.is_dir():
            self._refuse("RepoNotFound")
        elif found["revision"] not in (None, "main", self.hub.commit(kind, found["name"])):
            self._refuse("RevisionNotFound")
        else:
            return directory
        return None

    def _of_api(self, found: re.Match[str], form: dict[str, list[str]]) -> None:
        if (directory := self._directory(found, found["kind"])) is None:
            return
        every = {str(path.relative_to(directory)): path for path in self.hub.files(found["kind"], found["name"])}
        said: Any
        if found["what"] == "tree":
            inside = (found["path"] or "").strip("/")
            said = [_entry(name, path) for name, path in every.items() if not inside or name.startswith(f"{inside}/")]
            if inside and not said:
                self._refuse("EntryNotFound")
                return
        elif found["what"] == "paths-info":
            said = [_entry(name, every[name]) for name in form.get("paths", []) if name in every]
        else:
            siblings = [
                {"rfilename": name, "size": path.stat().st_size, "blobId": _digest(path.read_bytes())} for name, path in every.items()
            ]
            said = {
                "id": found["name"],
                "sha": self.hub.commit(found["kind"], found["name"]),
                "siblings": siblings,
                "private": False,
                "tags": [],
            }
        self._send(200, json.dumps(said).encode(), {"Content-Type": "application/json"})

    def _of_file(self, found: re.Match[str]) -> None:
        kind = "datasets" if found["kind"] else "models"
        if (directory := self._directory(found, kind)) is None:
            return
        file = directory / found["path"]
        if not file.is_file():
            self._refuse("EntryNotFound")
            return
        content = file.read_bytes()
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": self.hub.commit(kind, found["name"]), "Accept-Ranges": "bytes"}
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            self._send(200, content, headers)
            return
        begin, end = int(part[1]), min(int(part[2] or len(content) - 1), len(content) - 1)
        self._send(206, content[begin : end + 1], {**headers, "Content-Range": f"bytes {begin}-{end}/{len(content)}"})

    def _refuse(self, code: str) -> None:
        self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(name: str, path: Path) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _digest(path.read_bytes())}


@contextmanager
def hub_at(root: Path) -> Iterator[Hub]:
    """It answers while inside."""

    class Answers(_Answers):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    hub = Answers.hub = Hub(root, f"http://127.0.0.1:{server.server_port}")
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        serving.join()
