"""Write a model directory whose linear layers have fewer bits, as transformers and vLLM read it."""

from __future__ import annotations

import argparse
import dataclasses
import json

EXAMPLES = """examples:
  fw quantize runs/quickstart --to quickstart-w4
  fw quantize path/to/model --to model-w8 --bits 8 --method rtn
  fw quantize path/to/model --to model-w4 --text 'notes/**/*.md' --samples 256 --length 1024 --memory 16GiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to quantize, how, and by which text."""
    parser.add_argument("model", metavar="MODEL", help="model directory, step directory or run directory")
    parser.add_argument("--to", metavar="DIR", required=True, help="directory to make; it must not exist, or be empty")
    parser.add_argument("--method", default="gptq", metavar="M", help="gptq: codes by what layers see (the default); rtn: the nearest")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of a weight (4)")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="neighbours in a row that share a scale (128, 64 or 32, whatever divides); -1: whole rows",
    )
    parser.add_argument("--asymmetric", action="store_true", help="codes spread over what a group has; a byte more per group")
    parser.add_argument("--skip", action="append", metavar="PATTERN", help="layers that keep their weights; replaces *lm_head and *.gate")
    parser.add_argument("--text", nargs="+", default=["python-docs"], metavar="FILE", help="text files or globs (python-docs)")
    parser.add_argument("--samples", type=int, default=128, metavar="N", help="rows of text that gptq looks at (128)")
    parser.add_argument("--held-out", type=int, default=64, metavar="N", help="rows of other text that perplexity is of (64)")
    parser.add_argument("--length", type=int, metavar="L", help="tokens of a row (512, or the model's context)")
    parser.add_argument("--memory", metavar="SIZE", help="refuse to begin where more would be needed, as 8GiB")
    parser.add_argument("--dtype", metavar="DTYPE", help="of what keeps its weights, and of scales: bf16, fp16, fp32; the model's own")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Quantize, and say what it cost."""
    from fw.config import format_size, parse_size
    from fw.errors import UserError
    from fw.pretrained.quantize import Options, quantize
    from fw.training.inputs import say

    for name in ("samples", "held_out", "length"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}: {value} is too small; the least is 1")
    given = {"group_size": options.group_size, "symmetric": False if options.asymmetric else None, "skip": options.skip}
    chosen = Options(
        options.method,
        f"w{options.bits}a16",
        {key: value for key, value in given.items() if value is not None},
        options.text,
        options.samples,
        options.held_out,
        options.length,
        parse_size(options.memory) if options.memory else None,
        options.dtype,
    )
    found = quantize(options.model, options.to, chosen, say)
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=1))
        return 0
    change = found.perplexity_after / found.perplexity_before - 1
    print(f"{found.directory}: {found.layers} layers of {options.bits} bits by {found.method}")
    print(f"  weights     {format_size(found.bytes_before)} → {format_size(found.bytes_after)}")
    print(
        f"  perplexity  {found.perplexity_before:.4g} → {found.perplexity_after:.4g} ({change:+.2%}), {found.tokens:,} tokens of other text"
    )
    print(f"  memory      {format_size(found.peak_bytes)}, of {format_size(found.estimated_bytes)} estimated")
    return 0
