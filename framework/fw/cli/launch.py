"""Hand a run to a cluster: write the batch script or manifest and submit it.

The config is checked first, with its data where the cluster shares this machine's file system. Options of the launcher are overrides,
like launcher.time=2:00:00; 'fw plugins show launcher slurm' lists them.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext

from fw.cli import stdout

EXAMPLES = """examples:
  fw launch slurm configs/quickstart.yaml launch.nodes=2 launch.devices=8 sharding=fsdp launcher.time=4:00:00 --dry-run
  fw launch kubernetes configs/quickstart.yaml launch.devices=8 sharding=fsdp --image registry.example/fw:1 --dry-run
  fw launch slurm configs/quickstart.yaml launch.devices=2 sharding=fsdp --json | jq -r .job"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to, what, and whether for real."""
    parser.add_argument("launcher", help="name of a launcher plugin: slurm, kubernetes")
    parser.add_argument("config", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that win over the file's")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and submit nothing")
    parser.add_argument("--image", metavar="IMAGE", help="container image with fw, the same as launcher.image=IMAGE")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: launcher, job (null where nothing was submitted), said, run_dir, submission"
    )


def run(options: argparse.Namespace) -> int:
    """Print or submit."""
    from fw.kinds.launcher import Submitted
    from fw.training.submit import prepare

    overrides = [*options.overrides, *([f"launcher.image={options.image}"] if options.image else [])]
    with stdout.aside() if options.json else nullcontext():
        launcher, job, text = prepare(options.config, options.launcher, overrides)
        done = Submitted(None, "nothing was submitted") if options.dry_run else launcher.submit(job, text)
    if options.json:
        said = {"launcher": job.launcher, "job": done.job, "said": done.said, "run_dir": str(job.run_dir), "submission": text}
        print(json.dumps(said, indent=1))
    else:
        print(text if options.dry_run else f"fw: {done.said}\n", end="")
    return 0
