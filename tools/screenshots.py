"""Takes the pictures of pages that the documentation shows, of a run that is there: ./tools/docs pictures [RUN]."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from browser import CHROMIUM, Browser
from conftest import fw
from serving import serving

ROOT = Path(__file__).parent.parent
_IDLE = "document.getElementById('conversation').getAttribute('aria-busy') === 'false'"

_PLANNED = "[...document.querySelectorAll('#memory tbody td:nth-child(2)')].some(each => each.textContent !== '–')"


def chat(run: Path, picture: Path) -> None:
    """A server's page after two answers of the run's model."""
    with serving(run) as server, Browser(1280, 860) as browser:
        browser.open(server.url)
        browser.until("document.getElementById('state').dataset.state === 'ready' && document.getElementById('model').value")
        browser.get("document.getElementById('temperature').value = 0.7, document.getElementById('max-tokens').value = 60")
        browser.get("document.getElementById('plain').checked = true")  # it has no chat template
        for count, text in enumerate(("The list of arguments", "A dictionary is"), 1):
            browser.type(text)
            browser.press("Enter")
            browser.until(f"document.querySelectorAll('.facts').length === {count} && {_IDLE}")
        browser.until(_PLANNED)
        browser.until("document.getElementById('running').textContent.startsWith('0 of')")
        browser.picture(picture)


def page(file: Path, picture: Path, height: int) -> None:
    """A page of a file."""
    with Browser(1160, height) as browser:
        browser.open(file.as_uri())
        browser.picture(picture)


def main(words: list[str]) -> int:
    """Take them all; the exit code."""
    run = Path(words[0] if words else "runs/quickstart").resolve()
    if CHROMIUM is None:
        print("tools/docs: pictures are taken with chromium, which is not here (Debian: chromium)", file=sys.stderr)
        return 2
    if not (run / "report.html").is_file():
        print(f"tools/docs: {run} holds no run that has ended; make one with ./tools/quickstart", file=sys.stderr)
        return 2
    docs = ROOT / "docs"
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "plan.html"
        fw("plan", str(ROOT / "configs/quickstart.yaml"), "precision=bf16", "sharding=fsdp", "--world-size", "2", "--html", str(plan)).ok()
        page(plan, docs / "plan.png", 900)
    page(run / "report.html", docs / "report.png", 900)
    chat(run, docs / "serving.png")
    print(*(f"docs/{name}.png" for name in ("plan", "report", "serving")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
