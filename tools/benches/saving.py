"""Saving and loading measured: `fw`'s checkpoint against writing the same bytes with fsync, in turn, in the same minutes.

A model's fp32 weights and AdamW state of the size asked for are saved at once and in the background, and read back through mapped files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

import fw
from fw.checkpointing.ranks import OneRank
from fw.checkpointing.tensor_files import TensorFiles
from fw.config import parse_size
from fw.kinds.checkpoint import Part, Snapshot
from fw.place import place
from fw.training import rank, saving
from fw_plugins.checkpoint.safetensors import SafetensorsCheckpoint, SafetensorsConfig

LAYER = {
    "q": (2048, 2048),
    "k": (512, 2048),
    "v": (512, 2048),
    "o": (2048, 2048),
    "gate": (5632, 2048),
    "up": (5632, 2048),
    "down": (2048, 5632),
}


TIMES: list[list[tuple[float, float]]] = []


def state(size: int) -> dict[str, dict[str, torch.Tensor]]:
    """Weights and two moments, together as many bytes."""
    weights: dict[str, torch.Tensor] = {}
    left, number = size // 3, 0
    while left > 0:
        for name, shape in LAYER.items():
            weights[f"layers.{number}.{name}"] = torch.randn(shape)
            left -= weights[f"layers.{number}.{name}"].nbytes
            if left <= 0:
                break
        number += 1
    moments = {f"{name}/{key}": torch.randn_like(tensor) for key in ("exp_avg", "exp_avg_sq") for name, tensor in weights.items()}
    return {"model": weights, "optimizer": moments}


def plain(directory: Path, tensors: dict[str, dict[str, torch.Tensor]]) -> float:
    """Seconds to write the same bytes into a file per group, one after another, with fsync."""
    begun = time.perf_counter()
    for stem, group in tensors.items():
        with (directory / stem).open("wb", buffering=0) as file:
            for tensor in group.values():
                view = memoryview(tensor.numpy().reshape(-1).view("uint8"))
                while view:
                    view = view[file.write(view[: 1 << 24]) :]
            os.fsync(file.fileno())
    return time.perf_counter() - begun


def touch(size: int) -> None:
    """Make a virtual machine's host back as many free pages: it takes freed ones away after two seconds, and giving them back costs more
    than writing them. Whoever writes next, the peer or fw, finds them there."""
    memory = bytearray(size)
    memory[::4096] = b"1" * len(memory[::4096])


class Watched(saving.Saver):
    """Leaves its times."""

    def close(self) -> None:
        super().close()
        TIMES.append(self.times)


def stalls(directory: Path, size: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds for which `fw train` waits for each save: at once, and in the background. Steps of 256 tokens, shorter than any real one."""
    hidden, layers = 1024, 1
    while 12 * (layers * (4 * hidden**2 + 3 * hidden * 2816) + 2 * 258 * hidden) < size:
        layers += 1
    (directory / "corpus.txt").write_text(" ".join(str(number) for number in range(20_000)).replace("99", "\n\n"))
    config = {
        "model": {
            "name": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 16,
            "intermediate_size": 2816,
        },
        "data": {"name": "text", "files": [str(directory / "corpus.txt")], "tokenizer": "byte"},
        "train": {
            "max_steps": 2 * rounds + 1,
            "save_every": 2,
            "global_batch_size": 1,
            "sequence_length": 256,
            "val_every": 0,
            "sample_tokens": 0,
        },
        "checkpoint": {"name": "safetensors", "keep_last": 1},
        "launch": {"accelerator": "cpu"},
        "logger": [],
    }
    (directory / "run.yaml").write_text(json.dumps(config))
    rank.Saver = Watched
    for asynchronous in ("false", "true"):
        made = directory / f"asynchronous-{asynchronous}"
        fw.train(str(directory / "run.yaml"), f"checkpoint.asynchronous={asynchronous}", f"train.run_dir={made}")
        shutil.rmtree(made)
    at_once, background = TIMES[-2:]
    return [wait for _, wait in at_once[:rounds]], [wait for _, wait in background[:rounds]]


def rss_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    text = Path("/proc/self/status").read_text()
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(("RssAnon", "RssShmem")))


def loading_growth(step: Path, tensors: dict[str, dict[str, torch.Tensor]], ranks: int) -> tuple[int, int]:
    """Bytes a process grows by while it fills the first of ``ranks`` shards of the weights, and the shard's own bytes."""
    files = TensorFiles(step)
    before, most, shard = rss_bytes(), 0, {}
    for name, tensor in tensors["model"].items():
        rows = tensor.shape[0] // ranks
        shard[name] = torch.empty(rows, *tensor.shape[1:])
        shard[name].copy_(files.where[name].get_slice(name)[0:rows])
        most = max(most, rss_bytes())
    return most - before, sum(t.nbytes for t in shard.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GB", help="of weights and optimizer state (2GB)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", help="on the disk to measure; a temporary one if not given")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    tensors = state(parse_size(options.size))
    total = sum(tensor.nbytes for group in tensors.values() for tensor in group.values())
    parts = {stem: {name: Part(tensor) for name, tensor in group.items()} for stem, group in tensors.items()}
    plugin, ranks = SafetensorsCheckpoint(SafetensorsConfig()), OneRank()
    seconds: dict[str, list[float]] = {"plain": [], "at once": []}
    with tempfile.TemporaryDirectory(prefix="fw-bench-", dir=options.directory) as made:
        os.environ["FW_CACHE"] = str(Path(made) / "cache")
        directory = place(Path(made) / "checkpoints")
        for number in range(options.rounds):
            touch(total * 3 // 2)
            seconds["plain"].append(plain(Path(made), tensors))
            for path in tensors:
                (Path(made) / path).unlink()
            touch(total * 3 // 2)
            begun = time.perf_counter()
            step = plugin.save(directory, Snapshot(number, parts, {}, {}, lambda path: None), ranks)
            seconds["at once"].append(time.perf_counter() - begun)
            if number + 1 < options.rounds:
                step.remove()
        grown, shard = loading_growth(Path(str(step)), tensors, 4)
        step.remove()
        del parts, tensors
        waits = stalls(Path(made), total, options.rounds)
        block = bytes(1 << 28)
        begun = time.perf_counter()
        hashlib.sha256(block).digest()
        hashing = len(block) / (time.perf_counter() - begun)
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["at once"], strict=True)]
    found = {
        "bytes": total,
        "load_average": os.getloadavg()[0],
        "plain_bytes_per_s": total / statistics.median(seconds["plain"]),
        "save_bytes_per_s": total / statistics.median(seconds["at once"]),
        "sha256_bytes_per_s_of_a_core": hashing,
        "save_of_plain": statistics.median(ratios),
        "save_of_plain_all": ratios,
        "waits_at_once_s": waits[0],
        "waits_in_background_s": waits[1],
        "stall_of_save": statistics.median(waits[1]) / statistics.median(waits[0]),
        "loading_growth_beyond_shard_bytes": grown - shard,
    }
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{total / 1e9:.2f} GB, load average {found['load_average']:.1f}, SHA-256 on one core {hashing / 1e9:.2f} GB/s")
    print(f"writing with fsync          {found['plain_bytes_per_s'] / 1e9:.2f} GB/s")
    print(f"saving at once              {found['save_bytes_per_s'] / 1e9:.2f} GB/s, {found['save_of_plain']:.2f} of it")
    print(f"  each round                {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    for text, numbers in (("at once", waits[0]), ("in the background", waits[1])):
        print(f"fw train waits, saving {text:<18}  {statistics.median(numbers):.2f} s ({', '.join(f'{number:.2f}' for number in numbers)})")
    print(f"  of a save at once         {found['stall_of_save']:.1%}")
    print(f"loading a quarter           {(grown - shard) / 2**20:.0f} MiB beyond the shard")


main()
