"""What recomputation saves of activations, and what it costs in operations and time: one model of 24 blocks, a forward and backward.

    tools/bench activation --width 512 --tokens 1024

Bytes are the allocator's own events beyond parameters and gradients; operations are counted by FlopCounterMode; time is a ratio to the same
round without recomputation, rounds of all ways in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from tqdm import tqdm

import fw  # noqa: F401 - before torch is used, whose profiler it keeps quiet
from fw.checkpointing.placement import initialise
from fw.config import format_size
from fw.kinds import make
from fw.kinds.activation import ActivationPlugin
from fw.kinds.model import CausalLM
from fw.kinds.offload import OffloadPolicy
from fw.kinds.optimizer import OptimizerSpec
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw.meter.allocations import allocations
from fw.training.host_allocator import keep_freed_memory
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention

WAYS = {
    "`none`": "none",
    "`selective`": "selective",
    "`every_n`, n = 2": "every_n",
    "`sqrt`": "sqrt",
    "`full`": "full",
}
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, out_shape=None, **kwargs: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
"""torch counts the kernels of GPUs; by the same functions of its own, the CPU's."""


def build(way: str, options: argparse.Namespace) -> CausalLM:
    config = LlamaConfig(options.width, options.blocks, options.width // 64, intermediate_size=options.width * 11 // 4)
    with torch.device("meta"):
        model = Llama(config, 256, options.tokens, SDPAttention(None))
    precision = PrecisionPolicy(torch.float32, options.dtype, torch.float32)
    make(ActivationPlugin, way).apply(model, StepSpec(precision, OffloadPolicy(), OptimizerSpec(torch.optim.SGD, 0.1)), options.tokens)
    model.materialise(torch.device("cpu"))
    for name, parameter in model.named_parameters():
        initialise(parameter.data, name, model.init(name), 0)
        parameter.grad = torch.zeros_like(parameter)
    return model.train()


def forward(model: CausalLM, options: argparse.Namespace) -> Tensor:
    ids = torch.arange(options.batch * options.tokens).view(options.batch, options.tokens) % 256
    # Without head and loss: they are no affair of the blocks.
    with torch.autocast("cpu", options.dtype, enabled=options.dtype != torch.float32):
        loss: Tensor = model(ids, readout=lambda x, head, extra: x.float().square().sum())
    return loss


def measure(model: CausalLM, options: argparse.Namespace) -> dict[str, float]:
    """Bytes that wait for backward, bytes at the peak, operations."""
    forward(model, options).backward()
    with allocations(torch.device("cpu")) as found:
        loss = forward(model, options)
        found.mark("forward")
        loss.backward()
    del loss
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        forward(model, options).backward()
    return {"kept": found.marks["forward"], "peak": found.peak_bytes, "flops": counter.get_total_flops()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence (1024)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (1)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    options.dtype = torch.bfloat16 if options.bf16 else torch.float32
    load = os.getloadavg()[0]
    keep_freed_memory()  # as a run does; else fresh pages cost more than recomputation
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    found = {}
    with tqdm(total=len(WAYS) * (options.rounds + 1), disable=None) as bar:
        models = {}
        for way, name in WAYS.items():
            models[way] = build(name, options)
            found[way] = measure(models[way], options)
            bar.update()
        for number in range(options.rounds):
            for way in list(WAYS) if number % 2 else list(WAYS)[::-1]:
                began = time.perf_counter()
                forward(models[way], options).backward()
                seconds[way].append(time.perf_counter() - began)
                bar.update()
    first, *_ = WAYS
    shape = f"{options.blocks} blocks of width {options.width}, {options.batch} × {options.tokens} tokens, {str(options.dtype)[6:]}"
    print(f"{shape}; load average before {load:.2f}\n")
    print("| `activation` | waits for backward | of none's | peak | operations | time |\n|---|---|---|---|---|---|")
    for way in WAYS:
        own, none = found[way], found[first]
        ratio = statistics.median(a / b for a, b in zip(seconds[way], seconds[first], strict=True))
        sizes = f"{format_size(own['kept'])} | {own['kept'] / none['kept']:.0%} | {format_size(own['peak'])}"
        print(f"| {way} | {sizes} | {own['flops'] / none['flops']:.3f} | {ratio:.2f} |")


main()
