"""The contract of ``launcher``: how the ranks of a run start."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from fw.config import LaunchSection
from fw.errors import UserError
from fw.registry import Plugin

if TYPE_CHECKING:
    from fw.launching.job import Job

Prepare = Callable[[int], Mapping[str, str]]
"""Called with the number of an attempt, from 0, on the first host only and before any of its ranks starts; what it returns is added to
the environment of every rank of every host (``FW_LOG_DIR``, ``FW_RESUME_FROM``)."""


class Submitted(NamedTuple):
    """What became of a submission."""

    job: str | None
    """What the cluster calls it; None where nothing was submitted."""
    said: str
    """A line for the user."""


class LauncherPlugin(Plugin):
    """Starts ranks in the process the user started, or hands the run to a cluster."""

    kind: ClassVar[str] = "launcher"
    needs_rendezvous: ClassVar[bool] = False
    """Whether several hosts find each other only by ``launch.rendezvous``."""

    shares_files: ClassVar[bool] = False
    """Whether ranks see this machine's files, so that a submission can be checked with its data."""

    @abstractmethod
    def launch(self, command: Sequence[str], launch: LaunchSection, prepare: Prepare) -> int:
        """Run ``command`` on every rank of this host, with torchrun's environment variables, and wait.

        Called by ``fw train`` when ranks are to be started and no launcher has done so yet. Signals that ask to stop are passed on to
        the ranks, which save and end by themselves.

        Returns:
            the exit code of the run, as the command line returns it.

        Raises:
            UserError: this launcher does not start ranks in place.
        """

    def submission(self, job: Job) -> str:
        """The text that hands a run to a cluster: a batch script, a manifest. Called by ``fw launch``.

        Raises:
            UserError: this launcher has nothing to submit to, or an option does not fit.
        """
        raise UserError(f"launcher '{job.launcher}' has no cluster to submit to; 'fw train {job.config_file}' starts it right here")

    def submit(self, job: Job, text: str) -> Submitted:
        """Submit ``text``.

        Raises:
            RunError: the cluster did not take it.
            UserError: its tools are not installed here.
        """
        raise UserError(f"launcher '{job.launcher}' has no cluster to submit to")
