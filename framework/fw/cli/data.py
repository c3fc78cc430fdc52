"""Make data ready, look at it as a run would read it, and have a teacher say what it will be asked."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from fw.cli import colour
from fw.errors import UserError

EXAMPLES = """examples:
  fw data prepare config.yaml
  fw data prepare config.yaml --png lengths.png
  fw data preview config.yaml
  fw data preview config.yaml data.learn=last --samples 10 --split val
  fw data preview config.yaml --html preview.html
  fw data teach config.yaml objective='{name: distill, teacher: runs/large, answers: answers}'"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verbs below."""
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    prepare = verbs.add_parser(
        "prepare", help="tokenize ahead of a run, go on where an earlier pass was interrupted, and tell of what there is"
    )
    prepare.add_argument("config", help="a YAML file")
    prepare.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    prepare.add_argument("--html", metavar="FILE", type=Path, help="write a page, too")
    prepare.add_argument("--png", metavar="FILE", type=Path, help="write a picture of documents' lengths, too")
    prepare.add_argument("--json", action="store_true", help="print JSON")
    preview = verbs.add_parser("preview", help="show what is learnt of samples, and what is not")
    preview.add_argument("config", help="a YAML file")
    preview.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    preview.add_argument("--samples", type=int, default=3, metavar="N", help="so many, evenly over the data (3)")
    preview.add_argument("--split", choices=("train", "val"), default="train", help="of what is trained on, or held out (train)")
    preview.add_argument("--html", metavar="FILE", type=Path, help="write a page instead")
    teach = verbs.add_parser("teach", help="keep what a teacher says of all rows that the run will see, which then needs it no more")
    teach.add_argument("config", help="a YAML file, with objective=distill and objective.answers")
    teach.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")


def run(options: argparse.Namespace) -> int:
    """What the verb says."""
    return {"prepare": _prepare, "preview": _preview, "teach": _teach}[options.verb](options)


def _prepare(options: argparse.Namespace) -> int:
    """What a run would do anyway, once."""
    from fw.training.preparation import lines, page, picture, prepare

    found = prepare(options.config, *options.overrides)
    _write("--html", options.html, lambda: page(found).encode())
    _write("--png", options.png, lambda: picture(found).png())
    print(json.dumps(found.as_json(), indent=1) if options.json else "\n".join(lines(found)))
    return 0


def _write(option: str, file: Path | None, content: Callable[[], bytes]) -> None:
    """Where it is asked for."""
    if file is None:
        return
    try:
        file.write_bytes(content())
    except OSError as error:
        raise UserError(f"{option}: {file} cannot be written: {error.strerror}") from None


def _teach(options: argparse.Namespace) -> int:
    """Rows that have been asked about before are not again."""
    from fw.training.ahead import answer_ahead

    print(f"{answer_ahead(options.config, *options.overrides):,} rows are answered")
    return 0


def _preview(options: argparse.Namespace) -> int:
    """Print, in colour where the terminal has it, or write the page."""
    from fw.training.preview import as_page, as_text, preview

    found = preview(options.config, *options.overrides, samples=options.samples, split=options.split)
    if options.html is not None:
        _write("--html", options.html, lambda: as_page(found).encode())
        print(options.html)
        return 0
    print(as_text(found, coloured=colour.wanted()))
    return 0
