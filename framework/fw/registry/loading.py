"""Importing the one plugin a config names, and refusing what the core cannot honour."""

from __future__ import annotations

import dataclasses
import importlib
from typing import TypeVar

from fw.errors import UserError, did_you_mean
from fw.registry.apis import FIRST, Apis
from fw.registry.discovery import REGISTERED, Entry, allowed, entries
from fw.registry.inspection import forbidden, inspect
from fw.registry.plugin import Plugin

P = TypeVar("P", bound=Plugin)


def entry_of(kind: str, name: str) -> Entry:
    """The registration that is meant.

    Raises:
        UserError: there is none (with the list), none that this machine allows, or two distributions claim the name.
    """
    found = entries(kind, name)
    if not found:
        names = [e.name for e in entries(kind)]
        raise UserError(f"unknown {kind} '{name}'{did_you_mean(name, names)} (there are: {', '.join(names) or 'none'})")
    if not (usable := [entry for entry in found if allowed(entry)]):
        raise UserError(f"{kind} '{name}' {forbidden(found[0])}")
    if len(usable) > 1:
        rivals = " and ".join(f"{e.distribution} {e.version}" for e in usable)
        raise UserError(f"{kind} '{name}' is registered by {rivals}; uninstall one of them")
    return usable[0]


def load(kind: str, name: str, contract: type[P], apis: Apis = FIRST) -> type[P]:
    """Import the plugin ``name`` of ``kind``, written for one of ``apis``, the versions of the contract that the core speaks.

    Raises:
        UserError: as :func:`entry_of`; or a package missing, a module that fails to import, a class that does not fill the kind's contract,
            or an ``api`` version this core does not speak.
    """
    entry = entry_of(kind, name)
    problem = inspect(entry, apis).problem
    if problem.startswith("needs "):  # said before the import fails with less
        raise UserError(f"{kind} '{name}' {problem}")
    return _check(entry, _import(entry), contract, apis)


def _import(entry: Entry) -> object:
    if entry in REGISTERED:
        return REGISTERED[entry]
    what = f"{entry.kind} '{entry.name}' ({entry.distribution} {entry.version})"
    try:
        module = importlib.import_module(entry.module)
    except (Exception, SystemExit) as error:  # a plugin's module may raise anything; its name must be in the message
        raise UserError(f"{what} is broken: importing {entry.module} raised {type(error).__name__}: {error}") from error
    try:
        return getattr(module, entry.attribute)
    except AttributeError:
        raise UserError(f"{what} is broken: {entry.module} has no {entry.attribute}") from None


def _check(entry: Entry, cls: object, contract: type[P], apis: Apis) -> type[P]:
    what = f"{entry.kind} '{entry.name}' ({entry.distribution} {entry.version})"
    if not (isinstance(cls, type) and issubclass(cls, contract)):
        raise UserError(f"{what} is no {contract.__name__}: derive {entry.attribute} from {contract.__module__}.{contract.__name__}")
    if problem := apis.problem(entry.kind, cls.api, entry.distribution):
        raise UserError(f"{what} {problem}")
    if not dataclasses.is_dataclass(cls.Config):
        raise UserError(f"{what} is broken: its Config is no dataclass")
    return cls
