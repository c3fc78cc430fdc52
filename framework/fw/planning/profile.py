"""``fw profile``: what a run takes, measured in a few real steps."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from fw import config as configuration
from fw.errors import EXIT_INTERRUPTED, EXIT_OK, RunError, UserError
from fw.meter.detail import Detail
from fw.meter.document import MemoryDocument
from fw.planning.run import train
from fw.training import run_dir


def profile(config: str | Path, *overrides: str, steps: int = 3, timed: int | None = None) -> MemoryDocument:
    """Train for a few steps with every rank, and measure them.

    Args:
        config: a YAML file.
        overrides: ``key=value``, as on the command line.
        steps: whose memory is measured.
        timed: that follow and are timed; as many where None. The time of a step is not known without one.

    Raises:
        UserError: the config is wrong.
        RunError: the run failed.
        KeyboardInterrupt: it was stopped by Ctrl-C.
    """
    if steps < 1:
        raise UserError(f"--steps: {steps} is too small; the least is 1")
    if timed is not None and timed < 0:
        raise UserError(f"--timed: {timed} is too small; the least is 0")
    with tempfile.TemporaryDirectory(prefix="fw-profile-") as directory:
        own = {
            "train.max_steps": steps + (steps if timed is None else timed),
            "train.val_every": 0,
            "train.save_every": 0,
            "train.sample_tokens": 0,
            "train.run_dir": directory,
            "memory.measure_step": 1,
            "memory.measure_steps": steps,
            "launch.max_restarts": 0,
            "logger": "[]",
            "resume": "",
        }
        result = train(configuration.load(config, [*overrides, *(f"{key}={value}" for key, value in own.items())]), compares=False)
        if result.exit_code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if result.exit_code != EXIT_OK:
            raise RunError(f"the run that was to be measured ended with exit code {result.exit_code}")
        document, detail = (json.loads((Path(directory) / name).read_text()) for name in (run_dir.MEMORY, run_dir.MEMORY_DETAIL))
        return replace(MemoryDocument.from_json(document), detail=Detail.from_json(detail))
