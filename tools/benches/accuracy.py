"""`fw plan` against `fw profile` on configurations drawn by chance: docs/accuracy.md and its picture.

    tools/bench accuracy --seed 1 --seed 2
    tools/bench accuracy --seed 1 --only single --limit 3 --out runs/accuracy

Results are kept after each configuration, with fw's commit; the same command goes on where it was interrupted, and measures anew what is
no longer in their file. What `fw plan` refuses (exit code 2) is counted with its sentence, and another configuration drawn in its place.
Ranks run on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from tqdm import tqdm

from accuracy_page import dots, page
from accuracy_scatter import scatter
from accuracy_space import Drawn, draw, redraw

ROOT = Path(__file__).parents[2]
EXIT_REFUSED = 2
_MOST_ATTEMPTS = 50
_PART_OF_MEMORY = 0.8


class Ended(NamedTuple):
    """A process, exit code None where it took too long."""

    code: int | None
    out: str
    err: str

    def sentence(self) -> str:
        """What it said last."""
        lines = [line for line in self.err.strip().splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()]
        return (errors or lines or ["nothing"])[-1].removeprefix("fw: error: ")[:500]


def fw(*words: str, directory: Path, timeout: float) -> Ended:
    """``fw`` in a process with a directory and a cache of its own, and all that it starts."""
    directory.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "FW_CACHE": str(directory / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fw", *words],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
        return Ended(process.returncode, out, err)
    except subprocess.TimeoutExpired:
        return Ended(None, "", f"not finished after {timeout:.0f} s")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def measured(drawn: Drawn, options: argparse.Namespace, commit: str) -> dict[str, Any]:
    """Plan, then profile; the entry of the results."""
    refused: list[str] = []
    while True:
        entry: dict[str, Any] = {
            "key": drawn.key,
            "seed": drawn.seed,
            "label": drawn.label(),
            "choices": drawn.choices,
            "config": drawn.config,
            "refused": refused,
            "commit": commit,
            "date": str(date.today()),
        }
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fw-accuracy-") as directory:
            file = Path(directory) / "drawn.yaml"
            file.write_text(yaml.safe_dump(drawn.config, sort_keys=False))
            plan = fw("plan", str(file), "--json", directory=Path(directory) / "plan", timeout=options.timeout)
            why = plan.sentence() if plan.code == EXIT_REFUSED else _too_large(plan) if plan.code == 0 else ""
            if why:
                refused.append(re.sub(rf"{re.escape(str(file))}(:\d+)?:\s*", "", why))
                if len(refused) == _MOST_ATTEMPTS:
                    return {**entry, "outcome": "failed", "failure": f"{len(refused)} configurations in this place were refused"}
                drawn = redraw(drawn)
                continue
            if plan.code:
                return {**entry, "outcome": "failed", "failure": f"fw plan ended with {plan.code}: {plan.sentence()}"}
            profiles = []
            for number in range(options.repeats if drawn.ranks > 1 else 1):
                place = Path(directory) / f"profile-{number}"
                done = fw(
                    "profile", str(file), "--json", "--steps", str(drawn.steps), "--timed", "0", directory=place, timeout=options.timeout
                )
                if done.code != 0:
                    return {**entry, "outcome": "failed", "failure": f"fw profile ended with {done.code}: {done.sentence()}"}
                profiles.append(json.loads(done.out))
        found = {"outcome": "measured", "plan": json.loads(plan.out), "profiles": profiles}
        return {**entry, **found, "seconds": round(time.monotonic() - began, 1)}


def _too_large(plan: Ended) -> str:
    """A sentence where what all processes hold, as planned, is more than this machine can give them."""
    host = sum(rank["host_peak_bytes"] for rank in json.loads(plan.out)["per_rank"])
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return "too large for this machine, by its plan" if host > _PART_OF_MEMORY * memory else ""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, action="append", help="of the draw; may be given several times (1)")
    parser.add_argument("--configurations", type=int, default=60, metavar="N", help="of each seed (60)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of a configuration of several ranks (5)")
    parser.add_argument("--only", choices=("single", "several"), help="configurations of one process, or of several ranks")
    parser.add_argument("--limit", type=int, metavar="K", help="the first so many of those, of each seed")
    parser.add_argument("--timeout", type=float, default=900, metavar="S", help="seconds after which a plan or profile has failed (900)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="directory of accuracy.md and accuracy.svg (docs)")
    parser.add_argument("--results", type=Path, help="where measurements are kept (accuracy.json in OUT)")
    parser.add_argument("--again", action="store_true", help="measure failures of an earlier run again")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.results or options.out / "accuracy.json"
    results: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    wanted = [drawn for seed in options.seed or [1] for drawn in _chosen(draw(seed, options.configurations), options)]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    with tqdm(wanted, unit="configuration") as bar:
        for drawn in bar:
            key = f"{drawn.key} of {options.configurations}"
            if key in results and not (options.again and results[key]["outcome"] == "failed"):
                continue
            bar.set_postfix_str(drawn.label()[:60])
            results[key] = measured(drawn, options, commit)
            _write(kept, json.dumps(results, indent=1) + "\n")
    entries = [results[key] for key in sorted(results, key=_place)]
    if not any(entry["outcome"] == "measured" for entry in entries):
        raise SystemExit(f"nothing was measured: {'; '.join(entry['failure'] for entry in entries)}")
    _write(options.out / "accuracy.md", page(entries, len(wanted)))
    _write(options.out / "accuracy.svg", scatter(dots(entries), "Error of the predicted peak by measured peak"))
    print((options.out / "accuracy.md").read_text())


def _chosen(drawn: list[Drawn], options: argparse.Namespace) -> list[Drawn]:
    kind = [each for each in drawn if options.only is None or (each.ranks == 1) == (options.only == "single")]
    return kind[: options.limit]


def _place(key: str) -> tuple[int, ...]:
    return tuple(int(word) for word in key.replace("/", " ").replace("of", " ").split())


def _write(file: Path, text: str) -> None:
    """Whole or not at all."""
    aside = file.with_name(f"{file.name}.tmp")
    aside.write_text(text)
    aside.replace(file)


if __name__ == "__main__":
    main()
