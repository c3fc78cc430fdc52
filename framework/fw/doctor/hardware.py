"""Processors, GPUs, memory, disks."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fw.caches import cache_dir, user_cache
from fw.doctor.finding import Finding
from fw.kernels.cores import cores, quota
from fw.launching.cores import usable_cores

_GIB = 1 << 30
_WRITTEN = 256 << 20
"""Bytes that a disk's speed is measured with."""
_LITTLE_DISK, _LITTLE_SHARED, _FEW_FILES = 10 * _GIB, 1 * _GIB, 4096


def processor() -> Iterator[Finding]:
    """Cores that this process may use, and what they can do."""
    import torch

    here, all_cores = len(cores()), os.cpu_count() or 1
    flags = _flags()
    known = [
        name for name, flag in (("AMX", "amx_tile"), ("bf16", "avx512_bf16"), ("AVX-512", "avx512f"), ("AVX2", "avx2")) if flag in flags
    ]
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("processor", "ok", f"{here} of {all_cores} cores, {', '.join(known) or capability}")
    if (most := quota()) is not None and most < here - 0.5:
        text = f"the container may use {most:g} of these {here} cores' time: ranks have {usable_cores()} threads between them"
        yield Finding("processor", "note", text, "launch.threads says otherwise")


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def gpus() -> Iterator[Finding]:
    """Each with its memory, and what it computes in."""
    import torch

    if not torch.cuda.is_available():
        yield Finding("gpu", "note", "none; training and generating use the processor, and fw plan --device plans for one")
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        dtypes = ["fp16"] + ["bf16"] * (about.major >= 8) + ["fp8"] * ((about.major, about.minor) >= (8, 9))
        text = f"{index}: {about.name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free, compute {about.major}.{about.minor}"
        yield Finding("gpu", "ok", f"{text} ({', '.join(dtypes)})")
        if free < total / 2:
            yield Finding("gpu", "note", f"{index}: more than half of its memory is taken by others", "nvidia-smi shows by whom")


def memory() -> Iterator[Finding]:
    """Of the host: what is free, what may be locked for copies to GPUs, what ranks and loaders share."""
    import torch

    from fw.meter.memory import available_bytes

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = available_bytes(torch.device("cpu"))
    yield Finding("memory", "ok", f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB can be taken")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and torch.cuda.is_available():
        yield Finding(
            "memory", "note", f"{locked / _GIB:.2f} GiB may be locked (ulimit -l): RDMA between hosts needs more", "ulimit -l unlimited"
        )
    shared = Path("/dev/shm")
    if shared.is_dir() and (size := shutil.disk_usage(shared).total) < _LITTLE_SHARED:
        yield Finding(
            "memory",
            "problem" if torch.cuda.device_count() > 1 else "note",
            f"/dev/shm has {size / (1 << 20):.0f} MiB: loaders with workers and NCCL between GPUs of a host need more",
            "docker run --shm-size=8g, or loader.workers=0",
        )
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEW_FILES:
        fix = f"ulimit -n {min(most, 65536) if most != resource.RLIM_INFINITY else 65536}"
        yield Finding("memory", "note", f"{files} files may be open at once: a server with many clients needs more", fix)


def disks(places: dict[str, Path] | None = None, measured: bool = True) -> Iterator[Finding]:
    """What is free where runs and caches go, and how fast the first of these is.

    Args:
        places: by what goes there.
        measured: write and read a file in the first one.
    """
    where = places or {
        "runs": Path.cwd(),
        "cache": cache_dir(),
        "hub": Path(os.environ.get("HF_HOME") or user_cache() / "huggingface"),
        "temporary": Path(tempfile.gettempdir()),
    }
    for number, (name, path) in enumerate(where.items()):
        there = next(each for each in (path, *path.parents) if each.exists())
        if not os.access(there, os.W_OK):
            yield Finding("disk", "problem", f"{name}: {path} cannot be written", _writable(name))
            continue
        free = shutil.disk_usage(there).free
        text = f"{name}: {free / _GIB:.1f} GiB free at {path}"
        if measured and number == 0:
            written, read = _speed(there, min(_WRITTEN, free // 4))
            text += f", {written / 1e6:,.0f} MB/s written durably, {read / 1e6:,.0f} MB/s read"
        yield Finding("disk", "ok", text)
        if free < _LITTLE_DISK:
            yield Finding("disk", "note", f"{name}: little is left for checkpoints and models", "checkpoint.keep_last removes older ones")


def _writable(name: str) -> str:
    fixes = {
        "cache": "set FW_CACHE",
        "hub": "set HF_HOME",
        "temporary": "set TMPDIR",
        "runs": "go to another directory, or set train.run_dir",
    }
    return fixes.get(name, "")


def _speed(directory: Path, size: int) -> tuple[float, float]:
    """Bytes per second, written until they are durable, and read without the page cache where the system allows that."""
    block = os.urandom(1 << 20)
    count = max(1, size // len(block))
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".fw-doctor-") as file:
        begin = time.perf_counter()
        for _ in range(count):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.perf_counter() - begin
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.perf_counter()
        while file.read(1 << 22):
            pass
        read = time.perf_counter() - begin
    return count * len(block) / written, count * len(block) / read
