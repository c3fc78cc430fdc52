"""The command line: one file per verb; each parses, calls the library, prints. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from fw import __version__
from fw.errors import EXIT_FAILED, EXIT_INTERRUPTED, FwError, UserError

VERBS = {
    "train": "train what a config describes",
    "config": "print a config as it resolves, and where each value comes from",
    "plugins": "list and describe plugins",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (see '{self.prog} --help')")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fw``. Returns the exit code; errors made on purpose are one sentence on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        return _run(words)
    except FwError as error:
        if debug:
            raise
        # Every rank finds the same mistake in its input; it is said once. What fails on one rank alone names that rank.
        rank, first = os.environ.get("RANK", ""), os.environ.get("LOCAL_RANK", "0") == "0"
        if isinstance(error, UserError) and not first:
            return error.exit_code
        print(f"fw: error{f' (rank {rank})' if rank not in ('', '0') else ''}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fw: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the reader of our output has gone; the interpreter flushes at exit
        return EXIT_FAILED


def _run(words: list[str]) -> int:
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
            verb, help=summary, description=module.__doc__, epilog=module.EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    options = parser.parse_args(words)
    code: int = options.run(options)
    return code
