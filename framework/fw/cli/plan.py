"""Predict what a run takes: per rank and component, without a GPU, without weights, without starting it."""

from __future__ import annotations

import argparse
import json

from fw.cli import pictures

EXAMPLES = """examples:
  fw plan configs/quickstart.yaml
  fw plan configs/quickstart.yaml sharding=fsdp precision=bf16 --world-size 4
  fw plan configs/quickstart.yaml precision=bf16 --device h100-80gb
  fw plan configs/quickstart.yaml --html plan.html
  fw plan configs/quickstart.yaml --json"""

EXIT_DOES_NOT_FIT = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config, overrides, and what to plan for."""
    parser.add_argument("config", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks, instead of those that the config's launch section says")
    parser.add_argument(
        "--device", metavar="NAME|FILE", help="what to plan for; this machine's where left out (docs/memory.md has the names)"
    )
    pictures.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the document that docs/memory.md describes, and nothing else")
    parser.add_argument("--strict", action="store_true", help=f"exit with {EXIT_DOES_NOT_FIT} where a rank does not stay within the budget")


def run(options: argparse.Namespace) -> int:
    """Plan and print."""
    from fw.planning.plan import plan
    from fw.planning.tell import table

    pictures.check(options)
    found = plan(options.config, *options.overrides, world_size=options.world_size, device=options.device)
    pictures.write(options, found, "planned")
    print(json.dumps(found.as_json(), indent=1) if options.json else table(found, planned=True))
    return EXIT_DOES_NOT_FIT if options.strict and found.fits is False else 0
