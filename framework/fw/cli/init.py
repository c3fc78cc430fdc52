"""Begin with a config that fits: for a task, a model and a device, chosen by plan and commented."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from pathlib import Path

from fw.cli import stdout
from fw.errors import UserError

EXAMPLES = """examples:
  fw init
  fw init --task qlora --model meta-llama/Llama-3.1-8B --device rtx4090 --data 'my/chats.jsonl' --to mine.yaml
  fw init --task pretrain --model llama3.1-8b --device h100-80gb --ranks 8 --length 8192
  fw init --task serve --model runs/quickstart --device cpu --budget 2GiB
  fw init --task serve --model meta-llama/Llama-3.1-8B --device rtx4090
  fw init --task lora --model runs/quickstart --device cpu --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whatever is left out is asked for at a terminal, or has a default."""
    parser.add_argument("--task", metavar="TASK", help="pretrain, sft, lora, qlora, dpo or serve")
    parser.add_argument(
        "--model", metavar="MODEL", help="a model directory, a run, org/name of the hub; to pretrain also a name of fw models"
    )
    parser.add_argument("--device", metavar="NAME|FILE", help="what to plan for, as fw plan has it; this machine's where left out")
    parser.add_argument("--budget", metavar="SIZE", default="", help="memory of a rank, like 24GiB; the device's where left out")
    parser.add_argument("--data", metavar="GLOB", action="append", default=[], help="files to learn from; may be given again")
    parser.add_argument("--ranks", metavar="N", type=int, default=1, help="GPUs of one host that train or serve (1)")
    parser.add_argument("--length", metavar="N", type=int, help="tokens of a row (2048), or at most of a sequence that is served")
    parser.add_argument("--to", metavar="FILE", type=Path, help="the file to write (TASK.yaml); it must not exist")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the file's name: file, told, next")


def run(options: argparse.Namespace) -> int:
    """Choose, write, and say why and what comes next."""
    from fw.planning.beginning import TASKS, Wanted, begin

    asks = sys.stdin.isatty() and sys.stderr.isatty()
    known = ", ".join(TASKS)
    task = options.task or _asked("--task", f"task ({known})", "lora", asks)
    model = options.model or _asked("--model", "model (a directory, or org/name of the hub)", "", asks)
    device, budget, data = options.device, options.budget, options.data
    if asks and not (options.task and options.model):  # who gives these knows what he wants
        device = device or _asked("--device", "device (a name of fw plan's, or nothing for this machine)", "", asks) or None
        budget = budget or _asked("--budget", "memory of a rank, like 24GiB (nothing for the device's)", "", asks)
        data = data or (
            [] if task == "serve" else _asked("--data", "files to learn from, as a glob (nothing for an example)", "", asks).split()
        )
    target = options.to or Path(f"{task}.yaml")
    if target.exists():
        raise UserError(f"--to: {target} exists already; give another file")
    if not target.parent.is_dir():
        raise UserError(f"--to: {target.parent} is not a directory")
    with stdout.aside() if options.json else nullcontext():
        begun = begin(Wanted(model, task, device, budget, tuple(data), options.ranks, options.length))
    try:
        target.write_text(begun.text.replace("{}", str(target)))
    except OSError as error:
        raise UserError(f"--to: {target} cannot be written: {error.strerror}") from None
    commands = [command.replace("{}", str(target)) for command in begun.commands]
    if options.json:
        print(json.dumps({"file": str(target), "told": begun.told, "next": commands}, indent=1))
        return 0
    print(begun.told, file=sys.stderr)
    print(target)
    print("\n".join(["next:", *(f"  {command}" for command in commands)]), file=sys.stderr)
    return 0


def _asked(option: str, question: str, default: str, asks: bool) -> str:
    """At the terminal; what is given there without a word is the default."""
    if not asks:
        raise UserError(f"{option} is missing, and there is no terminal to ask at")
    print(f"{question}{f' [{default}]' if default else ''}: ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise UserError(f"{option} is missing")
    return line.strip() or default
