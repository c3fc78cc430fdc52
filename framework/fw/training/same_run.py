"""Who takes part in a run, and who may write its directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TextIO

from fw.errors import RunError, UserError
from fw.kernels.of_cpu import missing, wanted
from fw.kernels.switches import KERNELS, TRAINING_KERNELS, turned_off
from fw.kinds.checkpoint import Ranks
from fw.kinds.data import Corpus
from fw.recipe import Recipe

_STARTER = ".started-by"
_LOCK = ".lock"
_HOSTS_OWN = ("launch", "launcher")
"""Sections in which hosts of one run may differ: interfaces, ports, threads."""


def check_same_run(recipe: Recipe, ranks: Ranks) -> None:
    """See that all ranks are of the same run: launchers of two of them may have let them meet on a port.

    Raises:
        RunError: they are not, with what differs.
    """
    tree = {name: section for name, section in recipe.tree.items() if name not in _HOSTS_OWN}
    step = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")]
    digests = {name: hashlib.sha256(json.dumps(section, default=str).encode()).hexdigest() for name, section in tree.items()}
    told = ranks.gather((digests, step))
    for rank, (other, of) in enumerate(told):
        if differ := [name for name in other if other[name] != told[0][0].get(name)]:
            raise RunError(f"rank {rank} has another {', '.join(differ)} than rank 0: they are of two runs, or were given two configs")
        if of != told[0][1]:
            raise RunError(
                f"rank {rank} is of another job or step than rank 0: two runs have met on one port; set launch.port or MASTER_PORT"
            )


def check_same_data(corpus: Corpus, ranks: Ranks) -> None:
    """See that every rank draws from the same samples: files and caches are each host's own.

    Raises:
        RunError: a host has others.
    """
    told = ranks.gather((socket.gethostname(), corpus.fingerprint, len(corpus.train), len(corpus.val)))
    for rank, (host, *data) in enumerate(told):
        if data != list(told[0][1:]):
            raise RunError(
                f"rank {rank} on {host} has other data than rank 0 on {told[0][0]}: {data[1]:,} samples and {data[2]:,} held out, of rank"
                f" 0's {told[0][2]:,} and {told[0][3]:,}; give all hosts the same files, or one data.cache_dir"
            )


def check_same_kernels(ranks: Ranks) -> None:
    """See that updates are the same to the last bit on every rank: replicas that differ in them would drift apart for ever.

    Raises:
        RunError: some have kernels, and others not.
    """
    off = not wanted() or turned_off(KERNELS)
    told = ranks.gather((socket.gethostname(), "they are turned off there" if off else missing()))
    without = [(rank, host, why) for rank, (host, why) in enumerate(told) if why is not None]
    if 0 < len(without) < len(told):
        rank, host, why = without[0]
        raise RunError(
            f"rank {rank} on {host} has no CPU kernels of fw's ({why}), and others have: their updates differ in the last bits; give all"
            f" hosts a compiler, or set {TRAINING_KERNELS}=off on all"
        )


def begun_by_this_torchrun(run_dir: Path) -> bool:
    """Whether the run in this directory is the one whose ranks torchrun is starting again, and not one that was there before."""
    return older_checkpoints(run_dir) is not None


def older_checkpoints(run_dir: Path) -> frozenset[str] | None:
    """Identities of the checkpoints that were there when this torchrun began the run; None where it has not begun it."""
    try:
        starter, *older = (run_dir / _STARTER).read_text().splitlines()
    except (OSError, ValueError):
        return None
    return frozenset(older) if starter == _starter() else None


def note_starter(run_dir: Path, older: Collection[str] = ()) -> None:
    """Leave in the directory who has started the run, for its next attempt, and which checkpoints were there before it."""
    (run_dir / _STARTER).write_text("\n".join((_starter(), *sorted(older))))


def _starter() -> str:
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {os.getppid()} {socket.gethostname()}"


def lock_of(run_dir: Path) -> Path:
    """The file beside a run directory that whoever writes it has locked."""
    return run_dir.absolute().with_name(f".{run_dir.absolute().name}.lock")


def holder_is_gone(text: str) -> bool:
    """Whether the process that a lock's file names was one of this host, and is no more."""
    found = re.fullmatch(r"process (\d+) on (.*)\n", text)
    return found is not None and found[2] == socket.gethostname() and not _is_alive(int(found[1]))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def held_by(recipe: Recipe) -> Iterator[None]:
    """Hold what a run writes, its directory and where its checkpoints go, as :func:`held` does. What is behind a URL nobody holds.

    Raises:
        UserError: another run holds one of them.
    """
    with contextlib.ExitStack() as both:
        both.enter_context(held(recipe.run_dir))
        if recipe.checkpoint.config.to and recipe.checkpoints.local is not None:
            both.enter_context(_held_inside(recipe.checkpoints.local))
        yield


@contextlib.contextmanager
def _held_inside(to: Path) -> Iterator[None]:
    """The same for what ``checkpoint.to`` names, by a file in it: what it lies in may be others'. Removed where nothing came of it."""
    was_there = to.exists()
    try:
        to.mkdir(parents=True, exist_ok=True)
        file = (to / _LOCK).open("a+")
    except OSError as error:
        raise UserError(f"checkpoint.to: {to} cannot be written: {error.strerror}; give another place") from None
    try:
        with _locked(file, to / _LOCK, to, "checkpoint.to"):
            yield
    finally:
        if not was_there:
            with contextlib.suppress(OSError):
                to.rmdir()


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Hold a run directory against other runs for as long as this process lives, by a lock on a file beside it.

    Raises:
        UserError: another run holds it.
    """
    lock = lock_of(run_dir)
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a+")
    except OSError as error:
        raise UserError(f"train.run_dir: {run_dir} cannot be used: {error.strerror}; give another train.run_dir") from None
    with _locked(file, lock, run_dir, "train.run_dir"):
        yield


@contextlib.contextmanager
def _locked(file: TextIO, lock: Path, directory: Path, option: str) -> Iterator[None]:
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not lock.exists() or lock.stat().st_ino != os.fstat(file.fileno()).st_ino:
                raise BlockingIOError(errno.EAGAIN, "the run that held it has ended this moment")
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                yield  # a file system without locks
                return
            file.seek(0)
            raise UserError(
                f"{option}: another run is writing {directory} ({file.read().strip() or 'unknown process'});"
                f" wait for its end, or give another {option}"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                lock.unlink()
