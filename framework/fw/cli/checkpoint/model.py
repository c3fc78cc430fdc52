"""Actions on the model in a checkpoint or in a model directory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any


def add_actions(actions: Any) -> None:
    """``inspect`` and ``export``."""
    inspect = actions.add_parser("inspect", help="architecture, parameters, dtypes and files; no weights are read")
    inspect.add_argument("directory", metavar="DIR", help="run directory, step directory or model directory")
    inspect.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    inspect.set_defaults(act=_inspect)
    export = actions.add_parser(
        "export", help="write a model directory: config.json, tokenizer, safetensors; nothing of the trainer's state"
    )
    export.add_argument("source", metavar="RUN_OR_STEP", help="run directory (its latest step), step directory or model directory")
    export.add_argument("--to", metavar="DIR", required=True, help="directory to make; it must not exist, or be empty")
    export.add_argument("--dtype", metavar="DTYPE", help="bf16, fp16 or fp32; the stored one if not given")
    export.add_argument("--average", action="store_true", help="the average of weights that a run with train.ema_decay kept")
    export.add_argument("--max-shard-size", metavar="SIZE", default="5GiB", help="a file is closed before it grows beyond this (5GiB)")
    export.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")
    export.set_defaults(act=_export)


def _export(options: argparse.Namespace) -> int:
    from fw.config import format_size
    from fw.pretrained.export import export

    files = export(options.source, options.to, options.dtype, options.max_shard_size, options.average)
    total = sum(size for _, size in files)
    if options.json:
        print(json.dumps({"directory": options.to, "files": dict(files)}, indent=1))
        return 0
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
        written = f"written by {training['world_size']} rank(s){_mesh(training['mesh'])}, format {training['format']}"
        lines.append(("training state", f"step {training['step']:,}, {written}"))
        lines += [(f"  {name}", f"{value:.4f}") for name, value in (training["metrics"] or {}).items()]
    width = max(len(label) for label, _ in lines)
    print("\n".join(f"{label:<{width}}  {value}" for label, value in lines))
    return 0


def _mesh(mesh: Mapping[str, int] | None) -> str:
    return f" ({', '.join(f'{name} {size}' for name, size in mesh.items())})" if mesh else ""
