"""List models of published shape: parameters, bytes, keys and values per token. No weights are made or read."""

from __future__ import annotations

import argparse
import json

EXAMPLES = """examples:
  fw models list
  fw models list llama3-8b qwen3-30b-a3b
  fw models list runs/quickstart path/to/model --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action ``list``."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all models that have a size of their own, or those named")
    listing.add_argument("models", nargs="*", metavar="MODEL", help="name of a model plugin, or a model directory; all with a size if none")
    listing.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def run(options: argparse.Namespace) -> int:
    """Print a line per model."""
    from fw.config import format_size
    from fw.pretrained.sizes import size_of, sized_plugins

    sizes = [size_of(name) for name in options.models or sized_plugins()]
    if not options.models:
        sizes.sort(key=lambda size: (size.name.partition("-")[0], size.parameters))
    if options.json:
        print(json.dumps([size.as_json() for size in sizes], indent=1))
        return 0
    table: list[tuple[str, ...]] = [("MODEL", "PARAMETERS", "ACTIVE", "FP32", "BF16", "INT8", "4-BIT", "KV/TOKEN", "BLOCKS", "CONTEXT")]
    for size in sizes:
        active = f"{size.active_parameters:,}" if size.active_parameters != size.parameters else "all"
        window = f" ({size.windowed_blocks} see {size.window:,})" if size.windowed_blocks else ""
        table.append(
            (
                size.name,
                f"{size.parameters:,}",
                active,
                *(format_size(size.weight_bytes(bits)) for bits in (32, 16, 8, 4)),
                format_size(size.kv_bytes_per_token),
                f"{size.blocks}{window}",
                f"{size.context:,}" if size.context else "any",
            )
        )
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:8], widths[1:8], strict=True)),
            row[8].ljust(widths[8]),
        ]
        print("  ".join([*cells, row[9].rjust(widths[9])]).rstrip())
    print("\nbytes are those of the parameters alone; KV/TOKEN is keys and values of one token in bf16, over all blocks")
    return 0
