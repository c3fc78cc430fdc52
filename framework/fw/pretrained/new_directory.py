"""A directory that is there whole, or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from fw.errors import UserError
from fw.place import exchange


class new_directory:
    """A directory that appears under its name only when the ``with`` block has succeeded.

    Until then it is a hidden one beside it, which goes where the block fails, and on Ctrl-C and SIGTERM. What a process that was killed has
    left goes when the same name is made again: as long as its maker lives, it holds a lock on it.

    Args:
        overwrite: whether a model directory of that name may be replaced.

    Raises:
        UserError: there is something at ``path`` already that may not be replaced, or it cannot be made.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        self.path = path.resolve()
        self._made: Path | None = None
        self._overwrite = overwrite
        self._lock = -1
        self._termination: Termination | None = None
        if not path.exists():
            return
        if not path.is_dir():
            raise UserError(f"{path} is a file; give another directory")
        foreign = [inner.name for inner in sorted(path.iterdir()) if not (overwrite and _is_of_a_model(inner))]
        if foreign:
            raise UserError(f"{path} exists already and holds {foreign[0]}; give another directory, or remove it")

    def __enter__(self) -> Path:
        prefix, suffix = f".{self.path.name}.", ".tmp"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for left in self.path.parent.iterdir():
                if left.name.startswith(prefix) and left.name.endswith(suffix):
                    _remove_unless_held(left)
            self._termination = Termination()
            self._made = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=self.path.parent))
            self._made.chmod(0o755)
            self._lock = os.open(self._made, os.O_RDONLY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._end()
            raise UserError(f"{self.path} cannot be made: {error.strerror}; give another directory") from None
        return self._made

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._made is not None
        try:
            if kind is not None:
                shutil.rmtree(self._made, ignore_errors=True)
                return
            self._publish(self._made)
        finally:
            self._end()

    def _publish(self, made: Path) -> None:
        if self._overwrite and self.path.is_dir() and exchange(made, self.path):
            shutil.rmtree(made, ignore_errors=True)  # what bore the name before
            return
        if self._overwrite and self.path.is_dir():
            shutil.rmtree(self.path)
        try:
            made.rename(self.path)  # over an empty directory, too
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise
            number = 1
            while (aside := self.path.with_name(f"{self.path.name}.{number}")).exists():
                number += 1
            made.rename(aside)
            raise UserError(f"{self.path} was made by another meanwhile; what was to go there is now {aside}") from None

    def _end(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        if self._termination is not None:
            self._termination.end()


class Termination:
    """Until :meth:`end`, SIGTERM interrupts as Ctrl-C does, unless somebody handles it; then the process ends by it."""

    def __init__(self) -> None:
        self._came = False
        self._hears = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._hears:
            signal.signal(signal.SIGTERM, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        raise KeyboardInterrupt

    def end(self) -> None:
        """As it was before; where SIGTERM came, it is sent again."""
        if self._hears:
            self._hears = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._came:
                os.kill(os.getpid(), signal.SIGTERM)


def _remove_unless_held(left: Path) -> None:
    try:
        lock = os.open(left, os.O_RDONLY)
    except OSError:
        return  # gone, or another's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(left, ignore_errors=True)
    except OSError:
        pass  # its maker lives
    finally:
        os.close(lock)


def _is_of_a_model(path: Path) -> bool:
    """Whether :func:`fw.save_model` may have written it."""
    return path.suffix in (".json", ".jinja", ".safetensors") or path.name == "additional_chat_templates"
