"""Kill training runs at random moments, half of them while they save, and see whether anything is ever lost.

    tools/torture --kills 300

Each run trains a small model and saves every other step, at once or in the background, on one rank and on two. It is killed with SIGKILL
(all ranks, or one of them, whose peers must then end by themselves) and started again with resume=auto until it is done. After each kill
every checkpoint that has a name must verify, `latest` too; at the end each run's losses must equal those of an undisturbed run bit for bit.
Exit code 1 if anything is otherwise.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # what forks must have no threads

import yaml  # noqa: E402
from tqdm import tqdm  # noqa: E402

import fw.cli  # noqa: E402
import fw.training.rank  # noqa: E402  # imported once: the ranks are forks
import fw_plugins.sharding.fsdp  # noqa: E402, F401
from fw.checkpointing import commit  # noqa: E402
from fw.checkpointing.manifest import damages, read_manifest  # noqa: E402
from fw.errors import FwError  # noqa: E402
from fw.place import place  # noqa: E402

STEPS, SAVE_EVERY = 40, 2
PATIENCE_SECONDS = 240.0  # torch tries for three and a half time-outs to reach a rank that was killed before it listened
CASES = {
    "1 rank": (1, ()),
    "1 rank, asynchronous": (1, ("checkpoint.asynchronous=true",)),
    "2 ranks, fsdp": (2, ("sharding=fsdp",)),
    "2 ranks, fsdp, asynchronous": (2, ("sharding=fsdp", "checkpoint.asynchronous=true")),
}
CONFIG = {
    "model": {"name": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256},
    "data": {"name": "text", "files": ["corpus.txt"], "tokenizer": "byte"},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "train": {
        "max_steps": STEPS,
        "save_every": SAVE_EVERY,
        "global_batch_size": 4,
        "sequence_length": 64,
        "val_every": 0,
        "sample_tokens": 0,
    },
    "checkpoint": {"name": "safetensors", "keep_last": 3, "max_shard_size": "300KiB"},
    "launch": {"accelerator": "cpu", "timeout": 30},
    "logger": ["csv"],
}


@dataclass
class Tally:
    """What happened to the runs of one case."""

    kills: int = 0
    while_saving: int = 0
    one_of_two: int = 0
    resumed: int = 0
    went_back: int = 0
    runs: int = 0
    problems: list[str] = field(default_factory=list)


class Attempt:
    """The ranks of one start of a run."""

    def __init__(self, ranks: int, words: list[str], log: Path) -> None:
        self.pids = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, ranks, port, words, log)
            self.pids.append(pid)
        self.codes: dict[int, int] = {}

    def running(self) -> list[int]:
        """Ranks that have not ended."""
        for pid in self.pids:
            if pid not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self.pids if pid not in self.codes]

    def kill(self, pids: list[int]) -> None:
        """SIGKILL."""
        for pid in pids:
            if pid not in self.codes:
                os.kill(pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Whether all have ended in that time."""
        until = time.monotonic() + seconds
        while self.running():
            if time.monotonic() > until:
                return False
            time.sleep(0.002)
        return True


def _be_rank(rank: int, ranks: int, port: int, words: list[str], log: Path) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if ranks > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    code = 70
    try:
        code = fw.cli.main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def losses(run: Path) -> list[str]:
    """Of each step, as they were written."""
    with (run / "metrics.csv").open(newline="") as lines:
        return [row["loss"] for row in csv.DictReader(lines) if row["loss"]]


def is_saving(checkpoints: Path) -> bool:
    """Whether a draft stands there, or a step that ``latest`` does not mean yet."""
    try:
        names = os.listdir(checkpoints)
    except FileNotFoundError:
        return False
    if any(name.endswith(".tmp") for name in names):
        return True
    steps = [name for name in names if name.startswith("step-")]
    return bool(steps) and commit.latest(place(checkpoints)) != max(steps)


def check(checkpoints: Path) -> list[str]:
    """What is wrong with the checkpoints that have a name."""
    directory = place(checkpoints)
    problems = []
    names = commit.steps(directory)
    for name in names:
        try:
            problems += [f"{name}: {text}" for text in damages(directory / name, read_manifest(directory / name))]
        except FwError as error:
            problems.append(str(error))
    if os.path.lexists(checkpoints / "latest") and commit.latest(directory) not in names:
        problems.append("latest means no checkpoint")
    return problems


def torture(case: str, kills: int, chance: random.Random, work: Path, reference: list[str], bar: tqdm) -> Tally:
    """Kill runs of one case until there are as many kills, then let the last one finish."""
    ranks, options = CASES[case]
    tally = Tally()
    log = work / "log.txt"
    while tally.kills < kills and not tally.problems:
        run = work / f"run-{tally.runs}"
        checkpoints = run / "checkpoints"
        words = ["train", "torture.yaml", *options, f"train.run_dir={run}", "resume=auto"]
        while not tally.problems:
            latest = commit.latest(place(checkpoints)) if checkpoints.exists() else None
            attempt = Attempt(ranks, words, log)
            wants_saving = chance.random() < 0.6  # some of them come too late
            begun = time.monotonic()
            moment, delay = begun + chance.uniform(0, 3.0), chance.uniform(0, 0.04)
            killed = False
            while attempt.running():
                now = time.monotonic()
                if tally.kills < kills and ((wants_saving and is_saving(checkpoints)) or (not wants_saving and now > moment)):
                    time.sleep(delay if wants_saving else 0)
                    alone = ranks > 1 and chance.random() < 0.5
                    attempt.kill([chance.choice(attempt.pids)] if alone else attempt.pids)
                    killed = True
                    break
                if now - begun > PATIENCE_SECONDS:
                    tally.problems.append(f"an attempt hangs (see {log})")
                    attempt.kill(attempt.pids)
                    break
                time.sleep(0.0005)
            if not attempt.wait(PATIENCE_SECONDS):
                tally.problems.append(f"a rank whose peer was killed did not end within {PATIENCE_SECONDS:g} s")
                attempt.kill(attempt.pids)
            if killed and -signal.SIGKILL in attempt.codes.values():
                tally.kills += 1
                tally.one_of_two += alone
                tally.while_saving += is_saving(checkpoints)
                bar.update()
            elif any(attempt.codes.values()) and not killed:
                tally.problems.append(f"an attempt ended with {sorted(attempt.codes.values())} (see {log})")
            tally.problems += check(checkpoints)
            tally.resumed += latest is not None
            if not killed and not any(attempt.codes.values()):
                break
        if tally.problems:
            break
        tally.runs += 1
        found = losses(run)
        if found != reference:
            first = next((i for i, pair in enumerate(zip(found, reference, strict=False)) if pair[0] != pair[1]), "?")
            tally.problems.append(f"{run}: {len(found)} losses, {len(reference)} expected; the first that differs is that of step {first}")
        tally.went_back += log.read_text().count("going back to")
        for left in work.glob("run-*"):
            shutil.rmtree(left)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300, help="in all (300)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory(prefix="fw-torture-") as made, tqdm(total=options.kills, unit="kill", disable=None) as bar:
        os.chdir(made)
        os.environ["FW_CACHE"] = str(Path(made) / "cache")
        text = " ".join(f"{number} bottles of beer on the wall." for number in range(4000, 0, -1))
        Path("corpus.txt").write_text(text.replace("4", "four\n\n"))
        Path("torture.yaml").write_text(yaml.safe_dump(CONFIG))
        for number, (case, (ranks, more)) in enumerate(CASES.items()):
            work = Path(made) / f"case-{number}"
            work.mkdir()
            straight = Attempt(ranks, ["train", "torture.yaml", *more, f"train.run_dir={work / 'straight'}"], work / "log.txt")
            if not straight.wait(PATIENCE_SECONDS) or any(straight.codes.values()):
                print((work / "log.txt").read_text()[-3000:], file=sys.stderr)
                return 1
            reference = losses(work / "straight")
            share = options.kills // len(CASES) + (number < options.kills % len(CASES))
            bar.set_description(case)
            tallies[case] = torture(case, share, random.Random(options.seed + number), work, reference, bar)
            if tallies[case].problems:
                print((work / "log.txt").read_text()[-6000:], file=sys.stderr)
    report(tallies, options.json)
    return int(any(tally.problems for tally in tallies.values()))


def report(tallies: dict[str, Tally], as_json: bool) -> None:
    """A row per case."""
    if as_json:
        print(json.dumps({case: vars(tally) for case, tally in tallies.items()}, indent=1))
        return
    print("| | kills | while saving | one of two ranks | starts from a checkpoint | runs finished, losses equal | problems |")
    print("|---|---|---|---|---|---|---|")
    for case, tally in tallies.items():
        alone = tally.one_of_two if CASES[case][0] > 1 else "–"
        row = (case, tally.kills, tally.while_saving, alone, tally.resumed, tally.runs, len(tally.problems))
        print(f"| {' | '.join(map(str, row))} |")
    for case, tally in tallies.items():
        for problem in tally.problems:
            print(f"{case}: {problem}")


sys.exit(main())
