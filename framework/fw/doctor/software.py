"""Python, torch, compilers, what their caches have left, and the plugins."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from fw.caches import user_cache
from fw.doctor.finding import Finding
from fw.errors import FwError
from fw.launching.cores import usable_cores

_OLD_SECONDS = 600.0
"""After which a lock that a compiler took is one that it has left."""
_LIBRARIES = ("pytorch-lightning", "safetensors", "omegaconf", "deepspeed", "bitsandbytes", "torchao", "transformers", "peft", "triton")


def python() -> Iterator[Finding]:
    """The interpreter, and where it is."""
    bits = struct.calcsize("P") * 8
    yield Finding("python", "ok", f"{platform.python_version()}, {bits} bits, {sys.executable}")
    if bits < 64:
        yield Finding("python", "problem", "32 bits cannot map a model's files", "install a 64-bit Python")
    if sys.platform != "linux":
        yield Finding("python", "note", f"{sys.platform}: memory is measured on Linux only, and ranks are tested there")


def torch_itself() -> Iterator[Finding]:
    """The build, against the driver there is."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    threads = torch.get_num_threads()
    yield Finding("torch", "ok", f"{torch.__version__}, built for {build}, {threads} thread{'s' * (threads != 1)}")
    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    if driver and not torch.version.cuda:
        yield Finding("torch", "problem", "there is an NVIDIA driver, and this torch is built without CUDA", "install torch's CUDA build")
    elif driver and not torch.cuda.is_available():
        yield Finding("torch", "problem", "there is an NVIDIA driver, and torch sees no GPU", _why_no_gpu())
    if "OMP_NUM_THREADS" in os.environ and threads == 1 and usable_cores() > 1:
        yield Finding("torch", "note", "OMP_NUM_THREADS=1: one rank on the CPU takes one core", "unset it, or set launch.threads")


def _why_no_gpu() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden} may hide it"
    return "nvidia-smi says which CUDA the driver knows; install a driver at least as new as torch's build"


def libraries() -> Iterator[Finding]:
    """Versions, for a report of what went wrong."""
    found = []
    for name in _LIBRARIES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    yield Finding("libraries", "ok", ", ".join(found))


def compiler() -> Iterator[Finding]:
    """Whether the CPU's kernels are compiled, or can be."""
    from fw.kernels.build import NotCompiled, compiler as found, library

    begin = time.perf_counter()
    try:
        library()
    except NotCompiled as why:
        yield Finding(
            "kernels",
            "note",
            f"CPU kernels are not compiled, and training and generating take torch's operators: {why}",
            "install g++, or set CXX",
        )
        return
    yield Finding("kernels", "ok", f"CPU kernels are compiled by {found()} (loaded in {time.perf_counter() - begin:.1f} s)")


def locks(caches: list[Path] | None = None) -> Iterator[Finding]:
    """Locks of torch's extension builder, which DeepSpeed's operators use: one that a killed run left makes the next one wait for ever."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    where = caches or [Path(given) if given else user_cache() / "torch_extensions"]
    stale = [
        file
        for cache in where
        if cache.is_dir()
        for file in sorted(cache.rglob("lock"))
        if file.is_file() and time.time() - file.stat().st_mtime > _OLD_SECONDS
    ]
    for file in stale:
        minutes = (time.time() - file.stat().st_mtime) / 60
        yield Finding("locks", "problem", f"{file} is {minutes:,.0f} minutes old: whoever builds there waits for it", f"rm {file}")
    if not stale:
        yield Finding("locks", "ok", "no build has left a lock")


def plugins(imported: bool = True) -> Iterator[Finding]:
    """Which cannot be used here, and why.

    Args:
        imported: import those that others have made, too: what their source does not show fails then.
    """
    from fw import registry
    from fw.kinds import KINDS, plugin_class

    found = [(kind, line) for kind in KINDS for line in registry.listing(kind, KINDS[kind].apis)]
    usable = sum(line.available for _, line in found)
    own = sum(line.entry.distribution == registry.OWN for _, line in found)
    yield Finding("plugins", "ok", f"{usable} of {len(found)} can be used here, {len(found) - own} of them from elsewhere")
    for kind, line in found:
        if not line.available:
            elsewhere = line.entry.distribution != registry.OWN
            text, _, fix = line.problem.partition("; ")
            yield Finding("plugins", "problem" if elsewhere else "note", f"{kind} '{line.entry.name}' {text}", fix)
        elif imported and line.entry.distribution != registry.OWN:
            try:
                plugin_class(KINDS[kind].load_contract(), line.entry.name)
            except FwError as error:
                yield Finding("plugins", "problem", str(error), f"ask who makes {line.entry.distribution}, or uninstall it")
