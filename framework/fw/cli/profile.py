"""Measure what a run takes: a few real steps, per rank and component, by the allocator's own events."""

from __future__ import annotations

import argparse
import json

from fw.cli import pictures, stdout
from fw.cli.waiting import wait_asleep

EXAMPLES = """examples:
  fw profile configs/quickstart.yaml
  fw profile configs/quickstart.yaml sharding=fsdp launch.devices=2 --steps 5
  fw profile configs/quickstart.yaml --html profile.html --png profile.png
  fw profile configs/quickstart.yaml --trace trace
  fw profile configs/quickstart.yaml --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config, overrides, and how long to measure."""
    parser.add_argument("config", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps whose memory is measured")
    parser.add_argument("--timed", type=int, metavar="N", help="steps that are timed after those; as many where left out, 0 for none")
    parser.add_argument("--trace", metavar="DIR", help="write a step's trace there, for Perfetto, TensorBoard and PyTorch's memory viewer")
    pictures.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the document that docs/memory.md describes, and nothing else")


def run(options: argparse.Namespace) -> int:
    """Run the steps and print."""
    wait_asleep()
    from fw.planning.ask import profile

    pictures.check(options)
    with stdout.aside():
        found = profile(options.config, *options.overrides, steps=options.steps, timed=options.timed, trace=options.trace)
    pictures.write(options, found, "measured")
    print(json.dumps(found.as_json(), indent=1) if options.json else found)
    return 0
