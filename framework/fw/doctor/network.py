"""How ranks would reach each other: interfaces, names, and a collective over the loopback device."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, TimeoutError, as_completed

from fw.doctor.finding import Finding

_PATIENCE_S = 60.0
_RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
backend, rank, size, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(device)
dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timedelta(seconds=30))
x = torch.full((1 << 20,), float(rank + 1), device=device)
dist.all_reduce(x)
assert x.eq(size * (size + 1) / 2).all()
dist.destroy_process_group()
"""


def interfaces() -> Iterator[Finding]:
    """Those that are up, and whether this host finds itself by its name."""
    from fw.launching.network import addresses

    if sys.platform != "linux":
        yield Finding("network", "note", "interfaces are looked at on Linux only")
        return
    known = addresses()
    told = ", ".join(f"{name} {'/'.join(found)}" for name, found in known.items() if found)
    yield Finding("network", "ok", told or "no interface has an address")
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        yield Finding(
            "network",
            "note",
            f"this host's name, {name}, cannot be resolved: others would not find it by that",
            "use addresses in launch.rendezvous",
        )
        return
    if found.startswith("127.") and len(known) > 1:
        yield Finding(
            "network", "note", f"{name} is {found} to itself, where other hosts do not reach it", "give launch.interface on each host"
        )


def collectives() -> Iterator[Finding]:
    """Two ranks of gloo, and all GPUs of this host by NCCL where there are several."""
    import torch

    yield _collective("gloo", 2)
    if (count := torch.cuda.device_count()) > 1:
        yield _collective("nccl", count)


def _collective(backend: str, ranks: int) -> Finding:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    begin = time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, backend, str(rank), str(ranks), port],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    failed: Finding | None = None
    with ThreadPoolExecutor(ranks) as pool:
        said = {pool.submit(process.communicate): rank for rank, process in enumerate(processes)}
        try:
            for done in as_completed(said, timeout=_PATIENCE_S):
                if code := processes[said[done]].returncode:  # the others wait for it
                    failed = _failed(backend, ranks, _last_words(said[done], code, done.result()[1]))
                    break
        except TimeoutError:
            failed = _failed(backend, ranks, "nothing came within a minute")
        finally:
            for process in processes:
                process.kill()
    seconds = time.perf_counter() - begin
    return failed or Finding("collectives", "ok", f"{ranks} ranks add up over {backend} ({seconds:.1f} s with their start)")


def _last_words(rank: int, code: int, said: str) -> str:
    """A rank that a signal ends has not said so itself: what it wrote last may be a stack."""
    if code < 0:
        return f"rank {rank} ended with signal {-code}"
    return said.strip().splitlines()[-1] if said.strip() else f"rank {rank} ended with code {code}"


def _failed(backend: str, ranks: int, why: str) -> Finding:
    more = "NCCL_DEBUG=INFO says more; NCCL_P2P_DISABLE=1 goes around direct copies"
    fix = more if backend == "nccl" else "GLOO_SOCKET_IFNAME=lo names the device"
    return Finding("collectives", "problem", f"{ranks} ranks over {backend}: {why[:200]}", fix)
