"""Write a smaller model directory: fewer blocks, heads or features, or weights that are zero. Training on heals it."""

from __future__ import annotations

import argparse

from fw.cli import looking

EXAMPLES = """examples:
  fw prune runs/quickstart --to shallow --layers 3
  fw prune path/to/model --to narrow --features 4096 --heads 4
  fw prune path/to/model --to sparse --sparsity 2:4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to prune, how much stays, and by which text."""
    parser.add_argument("model", metavar="MODEL", help="model directory, step directory or run directory")
    parser.add_argument("--to", metavar="DIR", required=True, help="directory to make; it must not exist, or be empty")
    parser.add_argument("--layers", type=int, metavar="N", help="blocks that stay: those that change the hidden states most")
    parser.add_argument(
        "--heads", type=int, metavar="N", help="key and value heads that stay in a block, with the query heads that share them"
    )
    parser.add_argument("--features", type=int, metavar="N", help="features of the feed-forward network that stay in a block")
    parser.add_argument(
        "--sparsity", metavar="PART", help="part of each row of linear layers that becomes zero, as 0.5; or 2:4, two of four stay"
    )
    parser.add_argument("--method", default="wanda", metavar="M", help="of --sparsity: wanda, by what layers see (the default); magnitude")
    looking.add_arguments(parser, "decide")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prune, and say what it cost."""
    from fw.errors import UserError
    from fw.pretrained.prune import prune
    from fw.pretrained.sparse import Sparsity, sparsify
    from fw.training.inputs import say

    keep = {word: number for word in ("layers", "heads", "features") if (number := getattr(options, word)) is not None}
    if bool(keep) == bool(options.sparsity):
        raise UserError("give --layers, --heads or --features for a smaller model, or --sparsity for one with zeros")
    look = looking.look(options)
    if keep:
        found = prune(options.model, options.to, keep, look, say)
        return looking.told(found, f"{found.layers} blocks; kept {found.method}", options.json)
    found = sparsify(options.model, options.to, Sparsity.of(options.sparsity), options.method, look, say)
    return looking.told(found, f"{found.layers} layers, sparsity {options.sparsity} by {found.method}", options.json)
