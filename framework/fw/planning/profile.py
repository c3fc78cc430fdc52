"""``fw profile``: what a run takes, measured in a few real steps."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from fw import config as configuration
from fw.config import Config
from fw.errors import EXIT_INTERRUPTED, EXIT_OK, RunError, UserError
from fw.meter.binding import bound
from fw.meter.detail import Detail
from fw.meter.devices import of_product
from fw.meter.document import MemoryDocument
from fw.meter.speeds import Speeds
from fw.meter.step_time import StepTime
from fw.planning.fitted import startable
from fw.planning.host_speed import HostSpeed, threads_of
from fw.planning.run import train
from fw.training import run_dir


def profile(config: str | Path, *overrides: str, steps: int = 3, timed: int | None = None, trace: Path | None = None) -> MemoryDocument:
    """Train for a few steps with every rank, and measure them.

    Args:
        config: a YAML file.
        overrides: ``key=value``, as on the command line.
        steps: whose memory is measured.
        timed: that follow and are timed; as many where None. The time of a step is not known without one.
        trace: a directory for what ``memory.trace_step`` writes of a step after those, and where the time goes (``step-time.json``).
            A step is traced where steps are timed or this is given.

    Raises:
        UserError: the config is wrong.
        RunError: the run failed.
        KeyboardInterrupt: it was stopped by Ctrl-C.
    """
    if steps < 1:
        raise UserError(f"--steps: {steps} is too small; the least is 1")
    if timed is not None and timed < 0:
        raise UserError(f"--timed: {timed} is too small; the least is 0")
    if trace is not None:
        try:
            trace.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--trace: {trace} cannot be made: {error.strerror}; give another directory") from None
    timed = steps if timed is None else timed
    traced = bool(timed) or trace is not None
    with tempfile.TemporaryDirectory(prefix="fw-profile-") as directory:
        own = {
            "train.max_steps": steps + timed + traced,
            "train.val_every": 0,
            "train.save_every": 0,
            "train.sample_tokens": 0,
            "train.run_dir": directory,
            "memory.measure_step": 1,
            "memory.measure_steps": steps,
            "memory.trace_step": steps + timed + 1 if traced else 0,
            "launch.max_restarts": 0,
            "logger": "[]",
            "resume": "",
        }
        loaded = configuration.load(config, [*overrides, *(f"{key}={value}" for key, value in own.items())])
        result = train(loaded, compares=False)
        if result.exit_code == EXIT_INTERRUPTED:
            raise KeyboardInterrupt
        if result.exit_code != EXIT_OK:
            raise RunError(f"the run that was to be measured ended with exit code {result.exit_code}")
        document, detail = (json.loads((Path(directory) / name).read_text()) for name in (run_dir.MEMORY, run_dir.MEMORY_DETAIL))
        time = _time(loaded, Path(directory))
        if trace is not None:
            for file in sorted((Path(directory) / run_dir.TRACE).iterdir()):
                shutil.copy2(file, trace / file.name)
            if time is not None:
                (trace / run_dir.TIME).write_text(json.dumps(time.as_json(), indent=1) + "\n")
        return replace(MemoryDocument.from_json(document), detail=Detail.from_json(detail), time=time)


def _time(config: Config, directory: Path) -> StepTime | None:
    """Where the time went, with what binds; None where no step was timed or traced."""
    file = directory / run_dir.TIME
    if not file.is_file():
        return None
    time = StepTime.from_json(json.loads(file.read_text()))
    speeds = _speeds(config)
    if time.trace is None or speeds is None:
        return time
    loader = time.phases[0]["loader"] / (sum(time.phases[0].values()) or 1.0) if time.phases else 0.0
    return replace(time, bound=bound(time.trace, speeds, loader))


def _speeds(config: Config) -> Speeds | None:
    """Of what the ranks computed on; None for a GPU that is not known."""
    _, recipe = startable(config)
    if recipe.launch.accelerator != "cpu" and torch.cuda.is_available():
        return of_product(torch.cuda.get_device_name())
    return HostSpeed.measured(threads_of(recipe))
