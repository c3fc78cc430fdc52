"""Plugins that are not installed: a class is given a name by code, most often by a file that a config names under ``plugins:``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

from fw.errors import UserError
from fw.registry.discovery import ALLOWED, REGISTERED, Entry, entries
from fw.registry.plugin import Plugin

P = TypeVar("P", bound=type[Plugin])

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_file: ContextVar[tuple[str, str] | None] = ContextVar("fw.registering", default=None)
_HERE = "(registered)"
"""Version of what code of this process has registered; that of a file's plugins is the file's digest."""


def register(name: str) -> Callable[[P], P]:
    """Decorate a plugin's class with the name that configs call it by, for as long as this process lives; its kind is its contract's.

    In a file that a config names (``plugins: [./mine.py]``) it holds in every process of a run, since each reads the config. Called
    elsewhere, in a script or a notebook, it holds in that process alone. A class that is defined again takes the place of the former.

    Raises:
        UserError: the class fills no contract, the name is no name or is another plugin's, or only installed plugins are allowed here.
    """

    def named(cls: P) -> P:
        if not (isinstance(cls, type) and issubclass(cls, Plugin) and isinstance(getattr(cls, "kind", None), str)):
            given = getattr(cls, "__name__", repr(cls))
            raise UserError(f"fw.register('{name}'): {given} fills no kind's contract; derive it from one in fw.kinds")
        if not _NAME.fullmatch(name):
            raise UserError(f"fw.register('{name}'): a name is of letters, digits, '-', '_' and '.'")
        where, version = _file.get() or (cls.__module__, _HERE)
        _only_installed(f"{cls.kind} '{name}' of {where}")
        entry = Entry(cls.kind, name, f"{cls.__module__}:{cls.__qualname__}", where, version)
        for other in entries(cls.kind, name):
            if (other.distribution, other.target) != (entry.distribution, entry.target) or other not in REGISTERED:
                raise UserError(f"{cls.kind} '{name}' of {where} has the name of one of {other.distribution}; give it another")
            del REGISTERED[other]
        REGISTERED[entry] = cls
        return cls

    return named


def load_file(file: str | os.PathLike[str]) -> None:
    """Run a file that registers plugins, once as long as it stays the same.

    Raises:
        UserError: there is no such file, it fails, or registers nothing; or only installed plugins are allowed here.
    """
    path = Path(file).expanduser().resolve()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(f"{file}: " + ("is no Python file" if path.exists() else "there is no such file"))
    _only_installed(str(file))
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from error
    origin = (str(path), f"sha256:{hashlib.sha256(source).hexdigest()[:12]}")
    if any((entry.distribution, entry.version) == origin for entry in REGISTERED):
        return
    before = dict(REGISTERED)
    for entry in [entry for entry in REGISTERED if entry.distribution == origin[0]]:  # it has changed: what it says now counts
        del REGISTERED[entry]
    # A name of its own: plugins' classes are found by it when they are pickled, and it hides no module.
    module_name = f"fw_file_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}_{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    former = sys.modules.get(module_name)
    sys.modules[module_name] = module
    token = _file.set(origin)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
        if not any(entry.distribution == origin[0] for entry in REGISTERED):
            raise UserError(f"{file} registers no plugin; decorate a class in it with @fw.register('NAME')")
    except BaseException as error:
        REGISTERED.clear()
        REGISTERED.update(before)
        if former is None:
            del sys.modules[module_name]
        else:
            sys.modules[module_name] = former
        if isinstance(error, UserError) or not isinstance(error, Exception | SystemExit):
            raise
        raise UserError(f"{file}{_line(error, path)} raised {type(error).__name__}: {error}") from error
    finally:
        _file.reset(token)


def only_here(kind: str, name: str) -> bool:
    """Whether a plugin was registered by code of this process, so that no other process knows it."""
    return any(entry in REGISTERED and entry.version == _HERE for entry in entries(kind, name))


def _only_installed(what: str) -> None:
    if ALLOWED in os.environ:
        raise UserError(f"{what}: {ALLOWED} is set, so that only installed plugins may be used here; install it as a package, or unset it")


def _line(error: BaseException, path: Path) -> str:
    """Where in the file it came from, ``:12``."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f":{error.lineno}"
    found, trace = "", error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            found = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return found
