"""Python processes that begin with torch and Lightning imported already.

A short run spends nearly all its time importing. So where tests, and what they start, call `subprocess.Popen([sys.executable, ...])`, a
process that has done nothing but import forks. The child is like one of its own: the caller is its parent, and signals, exit codes,
sessions, pipes and the environment are as asked. A process starts cold if its environment differs in what Python, glibc or torch read
while they load; all do where FW_TESTS_COLD=1 is set, where a GPU is found, and where the system is not Linux.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import importlib
import inspect
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

_IMPORTED = [
    "fw",  # before torch, whose profiler it keeps quiet
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "pytorch_lightning",
    "tokenizers",
    "fw.cli",
    "fw.inference.rank",
    "fw.planning.ask",
    "fw.planning.run",
    "fw.training.rank",
    "fw_plugins.checkpoint.safetensors",
    "fw_plugins.data.text",
    "fw_plugins.launcher.local",
    "fw_plugins.model.llama",
    "fw_plugins.objective.causal_lm",
    "fw_plugins.optimizer.adamw",
    "fw_plugins.sharding.fsdp",
]
_READ_WHILE_LOADING = ("DS_", "GLIBC_", "GOMP_", "HF_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "PYTHON", "TORCH_")
_READ_LATER = {"OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
_COMPILERS = ("CC", "CXX")  # which peft leaves set where it fails to compile something
_AS_FW_SETS = {"OMP_WAIT_POLICY": "passive"}  # before it loads torch, for itself and for the ranks that it starts
_MODULES = {"fw", "torch.distributed.run"}  # what runs by `python -m`
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_MESSAGE = 1 << 20
_MOST_FDS = 16
_OUT_OF_THE_WAY = 500

_cold = subprocess.Popen._execute_child  # type: ignore[attr-defined]


class _Server:
    """A process that has only imported, seen from the one it makes children for."""

    def __init__(self, connection: socket.socket, environment: dict[str, str]) -> None:
        self._connection = connection
        self._loaded_with = environment
        self._one_at_a_time = threading.Lock()

    def takes(self, asked: dict[str, Any]) -> bool:
        """Whether a fork can stand for the process that is asked for."""
        special = [asked.get(name) for name in ("gid", "gids", "uid", "umask", "process_group")]
        if asked["preexec_fn"] or not asked["close_fds"] or any(value not in (None, -1) for value in special):
            return False
        first, *more = _words(asked)
        if first.startswith("-") and first != "-c" and (first != "-m" or more[0] not in _MODULES):
            return False
        environment = os.environ if asked["env"] is None else asked["env"]
        return _loaded_with(environment) == self._loaded_with and not _replaced(environment)

    def start(self, popen: Any, asked: dict[str, Any]) -> bool:
        """What Popen does to start a process: sets ``popen.pid``. False where the server has gone."""
        what = {
            "words": _words(asked),
            "unbuffered": "-u" in asked["args"][1:2],
            "environment": dict(os.environ if asked["env"] is None else asked["env"]),
            "directory": os.path.abspath(asked["cwd"] or "."),
            "new_session": asked["start_new_session"],
            "fds": [0, 1, 2, *asked["pass_fds"]],
        }
        if not os.path.isdir(what["directory"]):
            raise FileNotFoundError(2, "No such file or directory", what["directory"])
        fds = [asked[name] if asked[name] != -1 else inherited for inherited, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        fds += asked["pass_fds"]
        with self._one_at_a_time, _adopting():
            try:
                socket.send_fds(self._connection, [pickle.dumps(what)], fds)
                pid = self._connection.recv(32)
            except ConnectionError:
                return False
        if not pid:
            return False
        popen.pid = int(pid)
        popen._child_created = True
        popen._close_pipe_fds(*(asked[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))
        return True


@contextmanager
def _adopting() -> Iterator[None]:
    """Processes whose parent ends become this one's children meanwhile: so the server's grandchild does."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_SUBREAPER, 0, 0, 0, 0)


def _read_while_loading(environment: Any) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_READ_WHILE_LOADING) and k not in _READ_LATER}


def _loaded_with(environment: Any) -> dict[str, str]:
    return _AS_FW_SETS | _read_while_loading(environment)


@contextmanager
def loading_environment() -> Iterator[None]:
    """What libraries set inside is taken back: of what is read while loading (DeepSpeed sets DS_ACCELERATOR), since what starts later would
    be cold, and which compilers there are, since kernels would be compiled by others."""

    def here() -> dict[str, str]:
        return _read_while_loading(os.environ) | {name: os.environ[name] for name in _COMPILERS if name in os.environ}

    before = here()
    try:
        yield
    finally:
        for name in here():
            if name not in before:
                del os.environ[name]
        os.environ.update(before)


def _path(environment: Any) -> list[str]:
    return [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]


def _replaced(environment: Any) -> bool:
    """Whether PYTHONPATH has another version of what is imported already, or code to run at the start."""
    names = {"sitecustomize", "usercustomize", *(module.partition(".")[0] for module in _IMPORTED)}
    return any({name.partition(".")[0] for name in os.listdir(part)} & names for part in _path(environment) if os.path.isdir(part))


_server: _Server | None = None
_starting = threading.Lock()


def install() -> None:
    """From now on this process starts Python warm where it can."""
    if sys.platform != "linux" or "FW_TESTS_COLD" in os.environ or Path("/dev/nvidiactl").exists():
        return
    names = list(inspect.signature(_cold).parameters)

    def execute_child(self: Any, *values: Any) -> None:
        global _server
        asked = dict(zip(names[1:], values, strict=True))
        warm = _is_python(asked["args"]) and asked["executable"] is None and not asked["shell"]
        if warm:
            with _starting:
                _server = _server or _start_server()
        if not (warm and _server is not None and _server.takes(asked) and _server.start(self, asked)):
            _cold(self, *values)

    subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


def _is_python(words: Any) -> bool:
    return isinstance(words, list | tuple) and len(words) > 1 and words[0] == sys.executable


def _words(asked: dict[str, Any]) -> list[str]:
    """What follows the interpreter and its -u."""
    words = [os.fspath(word) for word in asked["args"]][1:]
    return words[1:] if words[0] == "-u" and len(words) > 1 else words


def _start_server() -> _Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(theirs.fileno())]
    os.set_inheritable(theirs.fileno(), True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        ours.close()
        os.execve(command[0], command, _AS_FW_SETS | os.environ)
    theirs.close()
    return _Server(ours, _loaded_with(os.environ))


# What follows runs in the server and in its children.


def _serve(connection: socket.socket) -> dict[str, Any]:
    """Make children until the caller has gone; returns in each child, with what is asked of it."""
    while True:
        message, fds, _, _ = socket.recv_fds(connection, _MESSAGE, _MOST_FDS)
        if not message:
            os._exit(0)
        told, tell = os.pipe()
        begin, go = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            connection.close()
            os.close(go)
            os.read(begin, 1)  # the one between has ended: the caller is the parent
            for fd in (told, tell, begin):
                os.close(fd)
            asked: dict[str, Any] = pickle.loads(message)
            away = [fcntl.fcntl(fd, fcntl.F_DUPFD, _OUT_OF_THE_WAY) for fd in fds]
            for fd in fds:
                os.close(fd)
            for fd, number in zip(away, asked["fds"], strict=True):
                os.dup2(fd, number)
                os.close(fd)
            return asked
        os.waitpid(between, 0)
        pid = os.read(told, 32)
        connection.send(pid)
        for fd in (told, tell, begin, go, *fds):
            os.close(fd)


def _import_deepspeed() -> None:
    """As the plugin does; what it sets in the environment is not the child's, which gets its own."""
    from fw_plugins.sharding.zero.engine import deepspeed

    deepspeed("cpu")
    importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")  # else with an engine; by a decorator it imports torch._inductor


def _become(asked: dict[str, Any]) -> None:
    """Run what is asked, as the interpreter would."""
    import random

    import numpy
    import torch

    if asked["new_session"]:
        os.setsid()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = _path(os.environ)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # as importing fw does
    sys.path[1:] = [*_path(os.environ), *(part for part in sys.path[1:] if part not in before)]
    os.chdir(asked["directory"])
    unbuffered = asked["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr, write_through=unbuffered)  # type: ignore[union-attr]
    faulthandler.enable()  # stacks where native code ends a process that a test started
    random.seed()
    numpy.random.seed()
    threads = int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    if "RANK" not in os.environ:
        _install_in_child()
    first, *more = asked["words"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        sys.argv, sys.path[0] = more, asked["directory"]
        runpy._run_module_as_main(more[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *more[1:]], ""
        exec(compile(more[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv, sys.path[0] = [first, *more], os.path.dirname(os.path.abspath(first))
        main.__file__ = first
        exec(compile(Path(first).read_bytes(), first, "exec"), main.__dict__)


def _install_in_child() -> None:
    """A server for what this process starts: a fork of it as it is now."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _be_server()
        _live(_serve(theirs))
        theirs.close()
    _server = _Server(ours, _loaded_with(os.environ))
    install()


def _be_server() -> None:
    """Neither ended by signals that are meant for the caller, nor holding its output open."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.close(nothing)


def _live(asked: dict[str, Any]) -> NoReturn:
    """From beginning to end. The end is not the interpreter's, which would copy every page that was shared to free what is on it."""
    code: Any = 0
    try:
        _become(asked)
    except SystemExit as exit:
        code = exit.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code is not None and code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    _be_server()
    for name in _IMPORTED:
        importlib.import_module(name)
    _import_deepspeed()
    import gc

    gc.collect()
    gc.freeze()
    _live(_serve(connection))
