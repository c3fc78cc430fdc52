"""A further Python process of this program, with a connection to it; it ends when this one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

from fw.errors import UserError, describe

_LATER = 5
_BEGIN = "import os, sys; sys.path[:] = sys.argv.pop().split(os.pathsep); from {module} import main; main()"


class Child:
    """A process that runs ``main()`` of a module, which calls :func:`joined`.

    Args:
        files: descriptors that it is to have, too.
        environment: variables beside this process's own.
    """

    def __init__(self, module: str, files: tuple[int, ...] = (), environment: Mapping[str, str] | None = None) -> None:
        self.connection, theirs = Pipe()
        alive, self._alive = os.pipe()
        given = [theirs.fileno(), alive, *files]
        words = [sys.executable, "-c", _BEGIN.format(module=module), *map(str, given), os.pathsep.join(sys.path)]
        try:
            # A session of its own: Ctrl-C in the terminal is this process's, who tells the other one.
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, pass_fds=given, env={**os.environ, **(environment or {})}, start_new_session=True
            )
        except BaseException:
            os.close(self._alive)
            raise
        finally:
            theirs.close()
            os.close(alive)

    def fate(self, told: UserError | str | None = None) -> str | UserError | None:
        """What became of it; None while it is there.

        Args:
            told: what it has said of its end, which :func:`ended` sends.
        """
        code = self.process.poll()
        if told is None and code is None:
            return None
        if isinstance(told, UserError):
            return told
        code = self.process.wait() if code is None else code
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            return f"was killed by {name}" + (" (which the kernel sends where host memory runs out)" if name == "SIGKILL" else "")
        return f"ended with exit code {code}" + (f": {told}" if told else "")

    def let_go(self) -> None:
        """It has heard enough, and ends."""
        self.connection.close()
        with suppress(OSError):
            os.close(self._alive)
        self._alive = -1

    def end(self, patience: float) -> None:
        """It has ended afterwards; by force where it takes more seconds."""
        self.let_go()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def joined() -> tuple[Connection[Any, Any], list[int]]:
    """In the other process: its connection, and the files it was given. It ends when who began it is gone, whatever it is doing."""
    # A supervisor may tell all processes of a service: who began this one says when it is to end.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    files = [int(word) for word in sys.argv[1:]]
    threading.Thread(target=_end_with, args=(files[1],), daemon=True).start()
    return Connection(files[0]), files[2:]


def give_way() -> None:
    """In the other process: let others go first, without waiting for them for ever.

    Where the kernel shares out time by sessions (sched(7), autogroup), a nice value counts within one alone, and this process has its own.
    """
    os.nice(_LATER)
    with suppress(OSError), open("/proc/self/autogroup", "w") as group:
        group.write(str(_LATER))


def ended(connection: Connection[Any, Any], run: Callable[[], object]) -> NoReturn:
    """In the other process: run, say what went wrong, and end; without the interpreter's own end, which threads of libraries may abort."""
    code = 0
    try:
        run()
    except EOFError:
        pass
    except Exception as error:
        code = 1
        with suppress(OSError):
            connection.send(error if isinstance(error, UserError) else describe(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with(file: int) -> None:
    os.read(file, 1)
    os._exit(1)
