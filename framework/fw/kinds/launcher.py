"""The contract of ``launcher``: how the ranks of a run start."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from fw.config import LaunchSection
from fw.registry import Plugin

OUTCOME_DIR = "FW_OUTCOME_DIR"
"""Environment variable: a directory in which a rank that was asked to stop leaves its exit code and then ends with 0, so that an elastic
agent does not take the stop for a failure."""


class LauncherPlugin(Plugin):
    """Called in the process the user started, when more than one rank is asked for and none has been started yet."""

    kind: ClassVar[str] = "launcher"

    @abstractmethod
    def launch(self, command: Sequence[str], launch: LaunchSection) -> int:
        """Run ``command`` on every rank of this host, with torchrun's environment variables, and wait.

        Signals that ask to stop are passed on to the ranks, which save and end by themselves.

        Returns:
            the exit code of the run, as the command line returns it.
        """
