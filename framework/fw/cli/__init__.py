"""The command line: one file per verb; each parses, calls the library, prints. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from fw import __version__
from fw.cli import completing, interrupts
from fw.errors import EXIT_FAILED, EXIT_INTERRUPTED, FwError, UserError
from fw.launching import outcome, rank_log, stacks

VERBS = {
    "init": "write a config for a task, a model and a device, chosen so that it fits",
    "train": "train what a config describes",
    "plan": "predict what a run takes, before it runs",
    "profile": "measure what a run takes, by running a few steps",
    "generate": "generate text with a model: one answer, or a file of them",
    "chat": "talk with a model",
    "eval": "say what a model is worth: losses of texts, tasks of the evaluation harness",
    "serve": "serve a model over HTTP, by OpenAI's interface",
    "launch": "hand a run to a cluster: SLURM, Kubernetes",
    "data": "look at data as a run reads it",
    "config": "print a config as it resolves, and where each value comes from",
    "plugins": "list and describe plugins",
    "models": "list models: parameters, bytes, keys and values per token",
    "quantize": "make a model directory of fewer bits, by what its layers see",
    "prune": "make a model directory of fewer blocks, heads, features or weights",
    "doctor": "look at this machine, say what is wrong and how to mend it",
    "checkpoint": "inspect and export checkpoints and model directories",
    "runs": "list runs: state, last loss, whether their checkpoints are whole",
    "completion": "print what makes a shell complete verbs, options and overrides",
    "compare": "set runs beside one another: configuration, figures, curves",
}

_DEBUG = "FW_DEBUG"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (see '{self.prog} --help')")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fw``. Returns the exit code; errors made on purpose are one sentence on stderr."""
    if arguments is None and "RANK" in os.environ:
        rank_log.attach()
        stacks.answer_when_asked()
    code = _guarded(arguments)
    if arguments is None and _had_process_group():
        _end_rank(code)
    if arguments is None:
        _end_quickly()
    return code


def _end_quickly() -> None:
    """Let the interpreter end without passing over all that was imported again and again, which takes a second with torch and Lightning.

    What nobody has any more, in a cycle, gets its end first; what somebody has until the end is then not collected, if it is in one. So
    open files are told to write out what they hold.
    """
    gc.collect()
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with suppress(Exception):  # closed, or read only
                each.flush()
    gc.freeze()


def _had_process_group() -> bool:
    """Also where a single rank that nobody launched was one of its own."""
    strategy = sys.modules.get("fw.training.strategy")
    return "RANK" in os.environ or (strategy is not None and strategy.joined)


def _end_rank(code: int) -> NoReturn:
    """End a rank's process without tearing the interpreter down.

    gloo's threads outlive ``destroy_process_group`` wherever DTensors keep the group alive, and one that drops its last collective
    while Python finalizes takes the process down with ``std::terminate`` ("terminate called without an active exception"), after the
    run has succeeded. So everything that is owed at exit is done here, and the rest is left to the kernel.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that are no daemons, as the interpreter would
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _guarded(arguments: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in words:
        os.environ[_DEBUG] = "1"  # the ranks that this process starts inherit it
    debug = _DEBUG in os.environ
    words = [word for word in words if word != "--debug"]
    try:
        with interrupts.heard():
            return _run(words)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader of our output has gone; the interpreter flushes at exit
        return EXIT_FAILED
    except Exception as error:
        if debug and not outcome.launcher_lives():
            traceback.print_exc()
        return _report(error)
    except KeyboardInterrupt:
        print("fw: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _report(error: Exception) -> int:
    """Say what went wrong in one sentence; returns the exit code."""
    rank = os.environ.get("RANK", "")
    where = f" (rank {rank})" if rank not in ("", "0") else ""
    code = error.exit_code if isinstance(error, FwError) else EXIT_FAILED
    line = f"fw: error{where}: {outcome.describe(error)}"
    if outcome.launched_by_fw():
        outcome.leave_failure(error, outcome.describe(error), code)
    if outcome.launcher_lives():
        trace = "" if isinstance(error, UserError) else traceback.format_exc()
        rank_log.to_log_only(trace + line)  # the launcher says it, and which rank was first
    # Every rank finds the same mistake in its input; it is said once. What fails on one rank alone names that rank.
    elif not isinstance(error, UserError) or os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr)
    return code


def _run(words: list[str]) -> int:
    options = parsed(words)
    code: int = options.run(options)
    return code


def parsed(words: list[str]) -> argparse.Namespace:
    """What a command line asks for: ``verb`` and its options, and ``run``, which does it."""
    parser = whole_parser()
    completing.answer(parser)
    options, more = parser.parse_known_args(words)
    # argparse takes positional arguments in one run only; a prompt and overrides may stand after an option too.
    if getattr(options, "prompt", "") is None and more and not more[0].startswith("-"):
        options.prompt = more.pop(0)
    overrides = [word for word in more if "=" in word and not word.startswith("-")]
    if len(overrides) < len(more) or (more and not hasattr(options, "overrides")):
        parser.error(f"unrecognized arguments: {' '.join(word for word in more if word not in overrides) or ' '.join(more)}")
    if more:
        options.overrides = [*options.overrides, *overrides]
    return options


def whole_parser() -> argparse.ArgumentParser:
    """Of all verbs."""
    parser = _Parser(
        prog="fw",
        description="Train, fine-tune and serve large language models inside a memory budget.",
        epilog="examples:\n  fw train configs/quickstart.yaml\n  fw config configs/quickstart.yaml --origin\n  fw plugins list sharding",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"fw {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for verb, summary in VERBS.items():
        module = importlib.import_module(f"fw.cli.{verb}")
        sub = verbs.add_parser(
            verb,
            help=summary,
            description=module.__doc__,
            epilog=module.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
        for action, of_action in actions_of(sub).items():
            own = [line for line in module.EXAMPLES.splitlines() if line.strip().startswith(f"fw {verb} {action}")]
            of_action.epilog = "\n".join(["examples:", *own]) if own else None
            of_action.formatter_class = argparse.RawDescriptionHelpFormatter
    return parser


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """What a verb has below itself: ``fw data prepare``."""
    groups = parser._subparsers._group_actions if parser._subparsers is not None else []
    return {name: each for group in groups if isinstance(group, argparse._SubParsersAction) for name, each in group.choices.items()}
