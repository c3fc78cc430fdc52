"""A step under torch.profiler: operator by operator, and as a file that Perfetto and TensorBoard read."""

from __future__ import annotations

import gzip
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fw.meter.operators import STEP, StepTrace, calls_of, step_trace
from fw.meter.transfers import gpu_rates, heard

_SNAPSHOT_ENTRIES = 1_000_000
_OFFLOADED_BYTES = 64 << 20
"""Between host and GPU, more than batches and numbers take: worth measuring what the way can carry."""


@contextmanager
def tracing(device: torch.device, directory: Path, rank: int) -> Iterator[list[StepTrace]]:
    """Trace what runs inside; the list has its one element at the end.

    Writes ``rankN.pt.trace.json.gz`` into ``directory``, and on a GPU ``rankN.memory.pickle``, which https://pytorch.org/memory_viz shows.
    """
    found: list[StepTrace] = []
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    directory.mkdir(parents=True, exist_ok=True)
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=_SNAPSHOT_ENTRIES)
    try:
        with (
            heard() as on_disk,
            profile(activities=activities, record_shapes=True, profile_memory=True) as record,
        ):
            with torch.profiler.record_function(STEP):
                yield found
            if on_gpu:
                torch.cuda.synchronize(device)
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(directory / f"rank{rank}.memory.pickle"))
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)
    assert record.profiler is not None and record.profiler.kineto_results is not None
    trace = step_trace(calls_of(record.profiler.kineto_results))
    moved = sum(each.nbytes for each in trace.transfers)
    most = gpu_rates(device) if on_gpu and moved >= _OFFLOADED_BYTES else {}
    between = [replace(each, most=most.get(each.way, 0.0)) for each in trace.transfers]
    found.append(replace(trace, transfers=[*between, *on_disk]))
    _write(record, directory / f"rank{rank}.pt.trace.json.gz")


def _write(record: profile, file: Path) -> None:
    """As torch does, but not line by line, of which there are hundreds of thousands."""
    with tempfile.TemporaryDirectory() as beside:
        whole = Path(beside, "trace.json")
        record.export_chrome_trace(str(whole))
        with whole.open("rb") as source, gzip.open(file, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
