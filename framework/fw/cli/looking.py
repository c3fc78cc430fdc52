"""Arguments and figures of what makes a smaller model directory of another."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fw.pretrained.rewriting import Look, Report


def add_arguments(parser: argparse.ArgumentParser, who: str) -> None:
    """Text, and what may be taken of it and of memory."""
    parser.add_argument("--text", nargs="+", default=["python-docs"], metavar="FILE", help="text files or globs (python-docs)")
    parser.add_argument("--samples", type=int, default=128, metavar="N", help=f"rows of text that {who} (128)")
    parser.add_argument("--held-out", type=int, default=64, metavar="N", help="rows of other text that perplexity is of (64)")
    parser.add_argument("--length", type=int, metavar="L", help="tokens of a row (512, or the model's context)")
    parser.add_argument("--memory", metavar="SIZE", help="refuse to begin where more would be needed, as 8GiB")
    parser.add_argument("--dtype", metavar="DTYPE", help="of weights that are written: bf16, fp16 or fp32; the model's own")


def look(options: argparse.Namespace) -> Look:
    """As they were given."""
    from fw.config import parse_size
    from fw.errors import UserError
    from fw.pretrained.rewriting import Look

    for name in ("samples", "held_out", "length"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}: {value} is too small; the least is 1")
    memory = parse_size(options.memory) if options.memory else None
    return Look(options.text, options.samples, options.held_out, options.length, memory, options.dtype)


def told(found: Report, what: str, as_json: bool) -> int:
    """Print what came of it."""
    from fw.config import format_size

    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return 0
    before, after = found.perplexity_before, found.perplexity_after
    print(f"{found.directory}: {what}")
    print(f"  weights     {format_size(found.bytes_before)} → {format_size(found.bytes_after)}")
    print(f"  perplexity  {before:.4g} → {after:.4g} ({after / before - 1:+.2%}), {found.tokens:,} tokens of other text")
    print(f"  memory      {format_size(found.peak_bytes)}, of {format_size(found.estimated_bytes)} estimated")
    return 0
