"""Write a model directory whose linear layers have fewer bits, as transformers and vLLM read it."""

from __future__ import annotations

import argparse

from fw.cli import looking

EXAMPLES = """examples:
  fw quantize runs/quickstart --to quickstart-w4
  fw quantize path/to/model --to model-w8 --bits 8 --method rtn
  fw quantize path/to/model --to model-w4 --text 'notes/**/*.md' --samples 256 --length 1024 --memory 16GiB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to quantize, how, and by which text."""
    parser.add_argument("model", metavar="MODEL", help="model directory, step directory or run directory")
    parser.add_argument("--to", metavar="DIR", required=True, help="directory to make; it must not exist, or be empty")
    parser.add_argument(
        "--method",
        default="gptq",
        metavar="M",
        help="gptq: codes by what layers see (the default); awq: weights scaled by it first; rtn: the nearest",
    )
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of a weight (4)")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="neighbours in a row that share a scale (128, 64 or 32, whatever divides); -1: whole rows",
    )
    parser.add_argument("--asymmetric", action="store_true", help="codes spread over what a group has; a byte more per group")
    parser.add_argument("--skip", action="append", metavar="PATTERN", help="layers that keep their weights; replaces *lm_head and *.gate")
    looking.add_arguments(parser, "gptq looks at")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Quantize, and say what it cost."""
    from fw.pretrained.quantize import quantize
    from fw.training.inputs import say

    look = looking.look(options)
    given = {"group_size": options.group_size, "symmetric": False if options.asymmetric else None, "skip": options.skip}
    settings = {key: value for key, value in given.items() if value is not None}
    found = quantize(options.model, options.to, options.method, f"w{options.bits}a16", settings, look, say)
    return looking.told(found, f"{found.layers} layers of {options.bits} bits by {found.method}", options.json)
