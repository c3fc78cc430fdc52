"""Say what a model is worth: how well it predicts sets of text, and how it does in tasks of the evaluation harness."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fw.cli.generate import load
from fw.errors import UserError

EXAMPLES = """examples:
  fw eval runs/quickstart --text python-docs
  fw eval path/to/model --text docs='docs/*.md' --text code='src/**/*.py' quantization=w4a16
  fw eval path/to/model --tasks hellaswag,arc_easy --limit 200 --output results.json
  fw eval path/to/model --tasks gsm8k --chat --num-fewshot 5 kv_cache=quantized"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, what it is tried with, and where that is told."""
    parser.add_argument("model", metavar="MODEL", help="model directory, adapter's directory, run directory, or org/name of the hub")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="kv_cache=…, quantization=…, offload.…, inference.…")
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="[NAME=]FILES",
        help="a set of text: files or a pattern, of .jsonl the 'text' of each line, or python-docs; may be given again",
    )
    parser.add_argument("--tasks", metavar="TASK,…", help="tasks of lm-eval by name (lm-eval ls tasks)")
    parser.add_argument("--include-path", type=Path, metavar="DIR", help="directory of further tasks")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question; the task's own number where left out")
    parser.add_argument("--limit", type=int, metavar="N", help="questions of each task; all where left out")
    parser.add_argument("--chat", action="store_true", help="put questions into the model's chat template")
    parser.add_argument("--adapter", metavar="DIR", help="adapter of the model, fw's or peft's")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all of it as JSON, each question and answer too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Texts first, then tasks."""
    tasks = [task for task in (options.tasks or "").split(",") if task]
    if not (tasks or options.text):
        raise UserError("say what with: --text FILES, --tasks TASK,…, or both")
    for name, given, least in (("num-fewshot", options.num_fewshot, 0), ("limit", options.limit, 1)):
        if given is not None and given < least:
            raise UserError(f"--{name}: {given} is too small; the least is {least}")
    if options.output is not None:
        _check_output(options.output)
    from fw.evaluating.held_out import TextSet

    sets = [TextSet.of(words) for words in options.text]
    if twice := [each.name for number, each in enumerate(sets) if each.name in [other.name for other in sets[:number]]]:
        raise UserError(f"--text: two sets are called {twice[0]}; name them, as NAME=FILES")
    if tasks:
        _need_harness()
    llm = load(options)
    try:
        told = _evaluated(llm, sets, tasks, options)
    finally:
        llm.close()
    if options.json:
        print(json.dumps({**told, "tasks": _short(told["tasks"])}, indent=1, default=str))
    return 0


def _need_harness() -> None:
    if find_spec("lm_eval") is None:
        raise UserError("--tasks needs lm-eval, which is not installed: pip install 'fw[eval]'")


def _evaluated(llm: Any, sets: list[Any], tasks: list[str], options: argparse.Namespace) -> dict[str, Any]:
    from fw.evaluating.held_out import held_out_loss

    told: dict[str, Any] = {"model": options.model, "text": {}, "tasks": {}}
    width = max((len(each.name) for each in sets), default=0)
    for number, each in enumerate(sets):
        loss = held_out_loss(llm, each)
        told["text"][each.name] = asdict(loss)
        _keep(told, options.output)
        if not options.json:
            if number == 0:
                print(f"{'':{width}}  {'tokens':>11}  {'loss':>8}  {'perplexity':>10}  {'bits/byte':>9}")
            print(
                f"{each.name:{width}}  {loss.tokens:11,}  {loss.loss:8.4f}  {loss.perplexity:10.3f}  {loss.bits_per_byte:9.4f}", flush=True
            )
    if tasks:
        from fw.evaluating import harness

        found = harness.run_tasks(
            llm, tasks, include=options.include_path, shots=options.num_fewshot, limit=options.limit, chat=options.chat
        )
        told["tasks"] = found
        if not options.json:
            print(harness.table(found), flush=True)
        _keep(told, options.output)
    return told


def _check_output(file: Path) -> None:
    """Before hours are spent on what is to be in it."""
    if not file.parent.is_dir():
        raise UserError(f"--output: there is no directory {file.parent}")
    if file.is_dir():
        raise UserError(f"--output: {file} is a directory; name a file")
    for each in (file.resolve().parent, file) if _is_replaced(file) else (file,):
        if each.exists() and not os.access(each, os.W_OK):
            raise UserError(f"--output: {each} cannot be written; name another file")


def _keep(told: dict[str, Any], file: Path | None) -> None:
    """What is known so far: what comes next may take hours."""
    if file is None:
        return
    text = json.dumps(told, indent=1, default=str) + "\n"
    target = file.resolve()
    aside = target.with_name(f".{target.name}.{os.getpid()}") if _is_replaced(file) else target
    try:
        aside.write_text(text)
        if aside != target:
            os.replace(aside, target)
    except OSError as error:
        if aside != target:
            aside.unlink(missing_ok=True)
        raise UserError(f"--output: {file} cannot be written: {error.strerror or error}") from None


def _is_replaced(file: Path) -> bool:
    """What is written is put in its place as a whole; into a pipe it goes as it is."""
    return file.is_file() or not file.exists()


def _short(tasks: dict[str, Any]) -> dict[str, Any]:
    return {key: tasks[key] for key in ("results", "groups", "versions", "n-shot", "n-samples") if key in tasks}
