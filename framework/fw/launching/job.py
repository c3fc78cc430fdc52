"""A run that is handed to a cluster instead of being started here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fw.config import LaunchSection


@dataclass(frozen=True)
class Job:
    """What ``fw launch`` hands over, checked.

    Attributes:
        launcher: the plugin's name.
        name: the config's, for the job.
        config_file: as given.
        overrides: ``key=value``, as given.
        config_text: the merged configuration as one YAML file.
        launch: hosts, ranks on each, time-outs.
        run_dir: the run's directory.
        resume: what the config says; empty for nothing.
    """

    launcher: str
    name: str
    config_file: str
    overrides: Sequence[str]
    config_text: str
    launch: LaunchSection
    run_dir: Path
    resume: str
