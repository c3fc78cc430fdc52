"""A newcomer's path, typed: this checkout's last commit cloned into an empty directory, README's first commands there, then every block of
docs/index.md in order, as one shell would; the server stays up until the last has been answered.

Nothing is taken from what this checkout has: no environment, no run, no cache. Ends with the time of each part, and with exit code 1 where
all but installing took longer than a quarter of an hour, or where the served model said nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 15 * 60
"""Seconds for all but installing."""
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_READY = "http://127.0.0.1:8000/ready"


class Newcomer:
    """Types commands in a clone."""

    def __init__(self, place: Path, cache: Path) -> None:
        self.place = place
        kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
        path = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if not each.startswith(str(ROOT)))
        self._environment = {**kept, "PATH": f"{place / '.venv/bin'}{os.pathsep}{path}", "FW_CACHE": str(cache)}
        self._server: subprocess.Popen[bytes] | None = None
        self.spent: list[tuple[str, float, bool]] = []
        """Commands, seconds, and whether they installed."""

    def type(self, command: str) -> None:
        """One of a shell."""
        if command.startswith("source "):  # PATH has what that does
            return
        if command.startswith("./tools/quickstart"):  # which installs first
            self._timed("(installing)", True, lambda: self._run("source tools/setup.sh && set_up"))
        if command.startswith("fw serve"):
            self._timed(command, False, lambda: self._serve(command))
        else:
            self._timed(command, command.startswith("pip "), lambda: self._run(command))

    def python(self, program: str) -> str:
        """What a program prints."""
        said: list[str] = []

        def run() -> None:
            words = [str(self.place / ".venv/bin/python"), "-c", program]
            said.append(subprocess.run(words, cwd=self.place, env=self._environment, check=True, capture_output=True, text=True).stdout)
            print(said[0], flush=True)

        self._timed(program, False, run)
        return said[0]

    def end(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()

    def _run(self, command: str) -> None:
        subprocess.run(["bash", "-c", command], cwd=self.place, env=self._environment, check=True)

    def _serve(self, command: str) -> None:
        self._server = subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=self.place, env=self._environment)
        while self._server.poll() is None:
            try:
                with urllib.request.urlopen(_READY, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise SystemExit(f"fw serve ended with {self._server.returncode}")

    def _timed(self, command: str, installs: bool, what: Callable[[], None]) -> None:
        print(f"\n$ {command.strip()}", flush=True)
        began = time.monotonic()
        what()
        took = time.monotonic() - began
        self.spent.append((command.strip().splitlines()[0], took, installs))
        print(f"({took:.0f} s)", flush=True)


def commands(block: str) -> list[str]:
    """One per line, continued lines joined, remarks left out."""
    joined = block.replace("\\\n", " ")
    found = [re.sub(r"\s+#\s.*$", "", line).strip() for line in joined.splitlines()]
    return [re.sub(r"\s{2,}", " ", line) for line in found if line]


def first_of_readme(readme: str) -> list[str]:
    """README's first block, without the project's own tests, which are for who changes it."""
    _, block = BLOCK.findall(readme)[0]
    return [command for command in commands(block) if not command.startswith("./tools/test")]


def main() -> int:
    """Clone, type, tell."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(prefix="fw-newcomer-") as directory:
        place = Path(directory) / "fw"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(place)], check=True)
        newcomer = Newcomer(place, Path(directory) / "cache")
        typed = first_of_readme((place / "README.md").read_text())
        said = ""
        try:
            for command in typed:
                newcomer.type(command)
            for language, text in BLOCK.findall((place / "docs" / "index.md").read_text()):
                if language == "python":
                    said = newcomer.python(text)
                    continue
                for command in commands(text):
                    if command not in typed:  # the page, too, begins with README's
                        newcomer.type(command)
        finally:
            newcomer.end()
    return report(newcomer.spent, said)


def report(spent: list[tuple[str, float, bool]], said: str) -> int:
    """Print the times; the exit code."""
    print("\n" + "\n".join(f"{took:6.0f} s  {command[:110]}" for command, took, _ in spent))
    installing = sum(took for _, took, installs in spent if installs)
    rest = sum(took for _, took, _ in spent) - installing
    print(f"\ninstalling {installing:.0f} s, all else {rest:.0f} s of {LIMIT}")
    if not said.strip():
        print("the served model said nothing", file=sys.stderr)
    return 0 if said.strip() and rest <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
