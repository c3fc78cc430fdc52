"""Predict what a run takes, or a model that generates: per rank and component, without a GPU, without weights, without starting it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fw.cli import pictures
from fw.errors import UserError

EXAMPLES = """examples:
  fw plan configs/quickstart.yaml
  fw plan configs/quickstart.yaml sharding=fsdp precision=bf16 --world-size 4
  fw plan configs/quickstart.yaml precision=bf16 --device h100-80gb
  fw plan configs/quickstart.yaml --html plan.html
  fw plan configs/quickstart.yaml --json
  fw plan configs/quickstart.yaml memory.budget=300MiB --fit --write small.yaml
  fw plan path/to/model inference.max_context=8192 inference.max_sequences=16 inference.budget=24GiB"""

EXIT_DOES_NOT_FIT = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config, overrides, and what to plan for."""
    parser.add_argument("config", metavar="CONFIG|MODEL", help="a YAML file, or a model directory or org/name of the hub to generate with")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks, instead of those that the config's launch section says")
    parser.add_argument(
        "--device", metavar="NAME|FILE", help="what to plan for; this machine's where left out (docs/memory.md has the names)"
    )
    parser.add_argument(
        "--fit", action="store_true", help="search what the config leaves open for the fastest run that stays within the budget"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="with --fit: write the chosen config, resolved, as YAML")
    parser.add_argument(
        "--pareto", type=Path, metavar="FILE", help="with --fit: draw memory against time of all that was searched (.svg or .png)"
    )
    pictures.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the document that docs/memory.md describes, and nothing else")
    parser.add_argument("--strict", action="store_true", help=f"exit with {EXIT_DOES_NOT_FIT} where a rank does not stay within the budget")


def run(options: argparse.Namespace) -> int:
    """Plan and print."""
    from fw.planning.ask import is_model, plan

    pictures.check(options)
    if is_model(options.config):
        for name in ("fit", "write", "pareto", "html", "png"):
            if getattr(options, name):
                raise UserError(f"--{name}: is for training runs; of a model that generates there is a table, and --json")
    if options.fit:
        return _fit(options)
    for option, file in (("--write", options.write), ("--pareto", options.pareto)):
        if file is not None:
            raise UserError(f"{option}: nothing is chosen without --fit")
    found = plan(options.config, *options.overrides, world_size=options.world_size, device=options.device)
    pictures.write(options, found, "planned")
    print(json.dumps(found.as_json(), indent=1) if options.json else found)
    return EXIT_DOES_NOT_FIT if options.strict and found.fits is False else 0


def _fit(options: argparse.Namespace) -> int:
    """Search, explain, print the plan of what was chosen."""
    from fw.config import to_yaml
    from fw.planning.ask import fit
    from fw.planning.pareto import pareto

    for option, file in (("--write", options.write), ("--pareto", options.pareto)):
        if file is not None and not file.parent.is_dir():
            raise UserError(f"{option}: {file.parent} is not a directory")
    if options.pareto is not None and options.pareto.suffix not in (".svg", ".png"):
        raise UserError(f"--pareto: {options.pareto} is neither an .svg nor a .png")
    found = fit(options.config, *options.overrides, world_size=options.world_size, device=options.device)
    document = found.document
    pictures.write(options, document, "planned", found.fit)
    try:
        if options.write is not None:
            options.write.write_text(to_yaml(found.recipe.tree))
        if options.pareto is not None:
            drawing = pareto(found.fit, f"Memory and time of {document.config}, planned")
            options.pareto.write_bytes(drawing.png() if options.pareto.suffix == ".png" else drawing.svg("pareto").encode())
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written: {error.strerror}") from None
    if options.json:
        print(json.dumps(document.as_json() | {"fit": found.fit.as_json()}, indent=1))
    else:
        print(found)
    return EXIT_DOES_NOT_FIT if options.strict and not found.fit.fits else 0
