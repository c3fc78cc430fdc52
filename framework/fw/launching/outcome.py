"""How a rank ended, left in a file for the launcher that started it: an exit code alone does not say why, or who was first."""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from fw import errors
from fw.errors import FwError, PeerError

OUTCOME_DIR = "FW_OUTCOME_DIR"
"""Environment variable: a directory for what the ranks of one attempt on one host leave for the launcher."""
LAUNCHER_PID = "FW_LAUNCHER_PID"
"""Environment variable: the launcher's process; while it lives, it tells the errors of its ranks."""
RESUME_FROM = "FW_RESUME_FROM"
"""Environment variable: the checkpoint from which an attempt goes on, empty for the beginning; the same for all ranks, whatever each
would find itself."""


@dataclass(frozen=True)
class Failure:
    """What ended a rank.

    Attributes:
        time: of the failure, seconds since the epoch.
        exit_code: with which the process is about to end.
        message: one sentence.
        trace: the Python traceback.
        of_peer: whether the cause is another rank, which died or did not answer.
    """

    time: float
    exit_code: int
    message: str
    trace: str
    of_peer: bool


def launched_by_fw() -> bool:
    """Whether this process is a rank that fw's own launcher has started."""
    return OUTCOME_DIR in os.environ and "RANK" in os.environ


def restarted_by_another() -> bool:
    """Whether torchrun, which knows nothing of checkpoints, has started this rank again after a failure."""
    return not launched_by_fw() and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launcher_lives() -> bool:
    """Whether that launcher is still there to speak for this rank."""
    return launched_by_fw() and os.environ.get(LAUNCHER_PID) == str(os.getppid())


def leave_stop(code: int) -> None:
    """Leave the exit code of a stop, for a rank that then ends with 0 so that no elastic agent takes the stop for a failure."""
    _file("stop").write_text(str(code))


def leave_failure(error: BaseException, message: str, exit_code: int) -> None:
    """Leave the failure for the launcher; the first one of a rank counts."""
    file = _file("failure")
    if file.exists():
        return
    trace = "".join(traceback.format_exception(error))
    failure = Failure(time.time(), exit_code, message, trace, isinstance(error, PeerError))
    aside = file.with_suffix(".part")
    aside.write_text(json.dumps(asdict(failure)))
    os.replace(aside, file)


def describe(error: BaseException) -> str:
    """The sentence that the command line prints for an error."""
    foreseen = isinstance(error, FwError) or (isinstance(error, OSError) and error.strerror)
    return errors.describe(error) + ("" if foreseen else " (unexpected; --debug shows the traceback)")


def failure_of(directory: Path, rank: int) -> Failure | None:
    """What a rank left, if it came to that."""
    try:
        return Failure(**json.loads((directory / f"rank-{rank}.failure").read_text()))
    except FileNotFoundError:
        return None


def stops(directory: Path) -> list[int]:
    """The exit codes of the ranks that were asked to stop."""
    return [int(file.read_text()) for file in directory.glob("rank-*.stop")]


def _file(what: str) -> Path:
    return Path(os.environ[OUTCOME_DIR]) / f"rank-{os.environ['RANK']}.{what}"
