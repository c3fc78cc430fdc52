"""Verify, inspect, compare, rewrite, prune, export checkpoints; convert and merge those of others. Paths, s3://, gs:// and the like."""

from __future__ import annotations

import argparse

from fw.cli.checkpoint import derive, model, steps

EXAMPLES = """examples:
  fw checkpoint verify runs/quickstart
  fw checkpoint inspect runs/quickstart
  fw checkpoint export runs/quickstart --to exported --dtype bf16
  fw checkpoint prune s3://bucket/run --keep-last 3 --dry-run
  fw checkpoint reshard runs/quickstart --to smaller --max-shard-size 500MB
  fw checkpoint convert deepspeed_run --to converted --like runs/quickstart
  fw checkpoint merge base adapter --to merged
  fw checkpoint diff runs/a/checkpoints/step-00000600 runs/b"""
_PARTS = (steps, model, derive)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """An action each."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for part in _PARTS:
        part.add_actions(actions)


def run(options: argparse.Namespace) -> int:
    """The action that was named."""
    code: int = options.act(options)
    return code
