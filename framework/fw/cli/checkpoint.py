"""Inspect a checkpoint or model directory, or export one as a Hugging Face model directory."""

from __future__ import annotations

import argparse
import json
from typing import Any

from fw.cli import derive

EXAMPLES = """examples:
  fw checkpoint inspect runs/quickstart
  fw checkpoint export runs/quickstart --to exported --dtype bf16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions ``inspect`` and ``export``, and those of :mod:`fw.cli.derive`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    inspect = actions.add_parser("inspect", help="architecture, parameters, dtypes and files; no weights are read")
    inspect.add_argument("directory", metavar="DIR", help="run directory, step directory or model directory")
    inspect.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    export = actions.add_parser(
        "export", help="write a model directory: config.json, tokenizer, safetensors; nothing of the trainer's state"
    )
    export.add_argument("source", metavar="RUN_OR_STEP", help="run directory (its latest step), step directory or model directory")
    export.add_argument("--to", metavar="DIR", required=True, help="directory to make; it must not exist, or be empty")
    export.add_argument("--dtype", metavar="DTYPE", help="bf16, fp16 or fp32; the stored one if not given")
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GiB", help="a file is closed before it grows beyond this (5GiB)")
    derive.add_arguments(actions)


def run(options: argparse.Namespace) -> int:
    """Dispatch."""
    if options.action in derive.ACTIONS:
        return derive.run(options)
    return _inspect(options) if options.action == "inspect" else _export(options)


def _export(options: argparse.Namespace) -> int:
    from fw.config import format_size
    from fw.pretrained.export import export

    files = export(options.source, options.to, options.dtype, options.max_shard_size)
    total = sum(size for _, size in files)
    print(f"{options.to}: {len(files)} file{'s' * (len(files) > 1)} of weights, {format_size(total)}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from fw.config import format_size
    from fw.pretrained.export import describe

    found = describe(options.directory)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0

    def size(count: int) -> str:
        return f"{count:,} ({format_size(count)})"

    lines: list[tuple[str, Any]] = [
        ("directory", found["directory"]),
        ("architecture", f"{found['architecture']} (read by: {found['plugin']})"),
        ("parameters", f"{found['parameters']:,}"),
        ("tensors", f"{found['tensors']:,}"),
        *((f"  {dtype}", f"{entry['tensors']:,} tensors, {size(entry['bytes'])} bytes") for dtype, entry in found["dtypes"].items()),
        ("weight files", len(found["shards"])),
        *((f"  {name}", f"{shard['tensors']:,} tensors, {size(shard['bytes'])} bytes") for name, shard in found["shards"].items()),
        ("tokenizer", "yes" if found["tokenizer"] else "no"),
    ]
    if found["training"]:
        training = found["training"]
        lines.append(
            ("training state", f"step {training['step']:,}, written by {training['world_size']} rank(s), format {training['format']}")
        )
    width = max(len(label) for label, _ in lines)
    print("\n".join(f"{label:<{width}}  {value}" for label, value in lines))
    return 0
