"""Head and loss in chunks of tokens against whole logits: bytes beyond the head's own gradient, and time as a ratio of the same round.

    tools/bench loss --vocabulary 131072 --tokens 8192 --width 512

Bytes are the allocator's own events; time is of forward and backward, a round of each after the other, without recording events.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import torch
from torch import Tensor, nn
from tqdm import tqdm

import fw  # noqa: F401 - before torch, whose profiler it keeps quiet
from fw.config import format_size
from fw.kinds.model import LinearHead
from fw.meter.allocations import allocations
from fw_plugins.objective.chunked_loss import TokenLoss


def step(x_TD: Tensor, weight_VD: nn.Parameter, labels_T: Tensor, chunk: int) -> float:
    """Seconds of forward and backward; ``chunk`` 0 is the whole."""
    x_TD.grad = weight_VD.grad = None
    began = time.perf_counter()
    loss, head = TokenLoss(), LinearHead(weight_VD)
    value = loss.chunked(x_TD, head, labels_T, chunk) if chunk else loss.of_logits(head(x_TD).float(), labels_T)
    value.backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    x_TD = torch.randn(options.tokens, options.width).to(dtype).requires_grad_()
    weight_VD = nn.Parameter((torch.randn(options.vocabulary, options.width) * 0.02).to(dtype))
    labels_T = torch.randint(options.vocabulary, (options.tokens,))
    own = options.vocabulary * options.width * max(4, dtype.itemsize) + x_TD.nbytes
    ways = [0, *options.chunks]
    seconds: dict[int, list[float]] = {way: [] for way in ways}
    peaks = {}
    with tqdm(total=len(ways) * (options.rounds + 1), disable=None) as bar:
        for way in ways:
            x_TD.grad = weight_VD.grad = None
            with allocations(torch.device("cpu")) as found:
                step(x_TD, weight_VD, labels_T, way)
            peaks[way] = found.peak_bytes - own
            bar.update()
        for _ in range(options.rounds):
            for way in ways:
                seconds[way].append(step(x_TD, weight_VD, labels_T, way))
                bar.update()
    rows = [
        {
            "chunk_tokens": way,
            "temporary_bytes": peaks[way],
            "time": statistics.median(a / b for a, b in zip(seconds[way], seconds[0], strict=True)),
        }
        for way in ways
    ]
    if options.json:
        print(json.dumps({**vars(options), "load": os.getloadavg()[0], "rows": rows}, indent=1))
        return
    print(f"{options.tokens:,} tokens, vocabulary {options.vocabulary:,}, width {options.width}, {options.dtype}")
    print("| chunk_tokens | bytes beyond the gradients of head and hidden states | time, of the whole's |\n|---|---|---|")
    for row in rows:
        print(f"| {row['chunk_tokens'] or 'all'} | {format_size(row['temporary_bytes'])} | {row['time']:.2f} |")


main()
