"""What each way to divide a run keeps on a rank, takes in a step and sends, on four ranks of this host over gloo."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from tqdm import tqdm

WAYS = {
    "ddp": "sharding=ddp",
    "fsdp": "sharding=fsdp",
    "fsdp, `reshard_after_forward: false`": "sharding={name: fsdp, reshard_after_forward: false}",
    "fsdp, `replicate: 2` × `shard: 2`": "sharding={name: fsdp, replicate: 2}",
    "fsdp, `tensor: 2` × `shard: 2`": "sharding={name: fsdp, tensor: 2}",
    "fsdp, `tensor: 4`": "sharding={name: fsdp, tensor: 4}",
    "fsdp, `context: 2` × `shard: 2`": "sharding={name: fsdp, context: 2}",
    "fsdp, `context: 4`, heads": "sharding={name: fsdp, context: 4}",
    "fsdp, `context: 4`, ring": "sharding={name: fsdp, context: 4, context_method: ring}",
    "zero, `stage: 1`": "sharding={name: zero, stage: 1}",
    "zero, `stage: 2`": "sharding={name: zero, stage: 2}",
    "zero, `stage: 3`": "sharding={name: zero, stage: 3}",
}
MODEL = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 1376}
SMALL = ["model.hidden_size=64", "model.num_hidden_layers=2", "model.intermediate_size=96"]
RANKS = 4


def measure(way: str, directory: str, options: argparse.Namespace) -> dict[str, int]:
    config = {
        "model": {"name": "llama", **MODEL},
        "data": {"name": "text", "files": ["none.txt"], "tokenizer": "byte"},
        "train": {"global_batch_size": RANKS, "micro_batch_size": 1, "sequence_length": options.length},
        "launch": {"accelerator": "cpu"},
        "precision": options.precision,
    }
    path = Path(directory) / "bench.yaml"
    path.write_text(yaml.safe_dump(config))
    rank = str(Path(__file__).with_name("sharding_rank.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), rank]
    # A network of its own, where nothing else is counted; MKL would keep the buffers of its products.
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    environment = {**os.environ, "MKL_DISABLE_FAST_MM": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*alone, *torchrun, str(path), json.dumps(SMALL), WAYS[way]], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    found: dict[str, int] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("found "))[6:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1024, help="tokens of the one sequence a replica computes at a time")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--only", default="", help="ways whose name contains this")
    options = parser.parse_args()
    print("| on 4 ranks | kept per rank | a step beyond that | sent per rank and step |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for way in tqdm([way for way in WAYS if options.only in way], unit="way", leave=False):
            mib = {key: value / 2**20 for key, value in measure(way, directory, options).items()}
            tqdm.write(f"| {way} | {mib['kept']:.0f} MiB | {mib['grown']:.0f} MiB | {mib['sent']:.0f} MiB |")


main()
