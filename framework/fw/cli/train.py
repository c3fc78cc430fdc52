"""Train what a config describes.

Starts launch.devices ranks on this host by itself; under torchrun or srun it is one of their ranks. Ctrl-C and SIGTERM save a
checkpoint and end the run (exit codes 130 and 75).
"""

from __future__ import annotations

import argparse
import json
import os

from fw.cli import stdout
from fw.cli.waiting import wait_asleep
from fw.errors import EXIT_FAILED

EXAMPLES = """examples:
  fw train configs/quickstart.yaml
  fw train configs/quickstart.yaml sharding=fsdp launch.devices=2 train.max_steps=20
  fw train configs/quickstart.yaml resume=auto
  fw train configs/quickstart.yaml --json | jq .summary.val_loss
  torchrun --nproc-per-node 2 -m fw train configs/quickstart.yaml sharding=ddp"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A config and overrides."""
    parser.add_argument("config", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    parser.add_argument("--json", action="store_true", help="print exit_code, run_dir and summary as JSON, or nothing where it fails")


def run(options: argparse.Namespace) -> int:
    """Train; returns the run's exit code."""
    wait_asleep()
    from fw.planning.run import train

    if not options.json:
        return train(options.config, *options.overrides).exit_code
    with stdout.aside():
        done = train(options.config, *options.overrides)
    if done.exit_code != EXIT_FAILED and os.environ.get("RANK", "0") == "0":
        print(json.dumps({"exit_code": done.exit_code, "run_dir": str(done.run_dir), "summary": done.summary}, indent=1))
    return done.exit_code
