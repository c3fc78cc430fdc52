"""The blocks of docs/index.md, run in order, as one shell would; the server stays up until the last has been answered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "index.md"
LIMIT = 15 * 60
"""Seconds for all but installing."""
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEALTH = "http://127.0.0.1:8000/health"


def main() -> int:
    spent = installing = 0.0
    server: subprocess.Popen[bytes] | None = None
    environment = {**os.environ, "PATH": f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ['PATH']}"}
    try:
        for language, text in _BLOCK.findall(PAGE.read_text()):
            for command in _commands(text) if language == "bash" else [text]:
                print(f"\n$ {command.strip()}", flush=True)
                began = time.monotonic()
                if command.startswith("fw serve"):
                    server = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=ROOT, env=environment)
                    _wait_until_healthy(server)
                elif language == "python":
                    subprocess.run([ROOT / ".venv/bin/python", "-c", command], cwd=ROOT, env=environment, check=True)
                elif command.startswith("./tools/quickstart"):
                    subprocess.run(["bash", "-c", "source tools/setup.sh && set_up"], cwd=ROOT, env=environment, check=True)
                    installing += time.monotonic() - began
                    began = time.monotonic()
                    subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=True)
                elif command.startswith("pip "):
                    subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=True)
                    installing += time.monotonic() - began
                    began = time.monotonic()
                elif not command.startswith("source "):  # PATH has what that does
                    subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, check=True)
                took = time.monotonic() - began
                spent += took
                print(f"({took:.0f} s)", flush=True)
    finally:
        if server is not None:
            server.terminate()
            server.wait()
    print(f"\ninstalling {installing:.0f} s, all else {spent:.0f} s of {LIMIT}")
    return 0 if spent <= LIMIT else 1


def _commands(text: str) -> list[str]:
    """Lines, those that go on joined, without comments."""
    joined = text.replace("\\\n", " ")
    found = [re.sub(r"\s+#\s.*$", "", line).strip() for line in joined.splitlines()]
    return [re.sub(r"\s{2,}", " ", line) for line in found if line]


def _wait_until_healthy(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(_HEALTH, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"fw serve ended with {server.returncode}")


if __name__ == "__main__":
    sys.exit(main())
