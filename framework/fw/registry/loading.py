"""Importing the one plugin a config names, and refusing what the core cannot honour."""

from __future__ import annotations

import dataclasses
import importlib

from fw.errors import UserError, did_you_mean
from fw.registry.discovery import Entry, entries
from fw.registry.inspection import listing
from fw.registry.plugin import Plugin


def load(kind: str, name: str, contract: type[Plugin]) -> type[Plugin]:
    """Import the plugin ``name`` of ``kind``.

    Raises:
        UserError: no such plugin (with the list), two distributions claiming the name, a package missing, a module that fails to
            import, a class that does not fill the kind's contract, or an ``api`` version this core does not speak.
    """
    found = entries(kind, name)
    if not found:
        names = [e.name for e in entries(kind)]
        raise UserError(f"unknown {kind} '{name}'{did_you_mean(name, names)} (there are: {', '.join(names) or 'none'})")
    if len(found) > 1:
        rivals = " and ".join(f"{e.distribution} {e.version}" for e in found)
        raise UserError(f"{kind} '{name}' is registered by {rivals}; uninstall one of them")
    entry = found[0]
    problem = next((line.problem for line in listing(kind) if line.entry == entry and "needs" in line.problem), "")
    if problem:
        raise UserError(f"{kind} '{name}' {problem}")
    return _check(entry, _import(entry), contract)


def _import(entry: Entry) -> object:
    what = f"{entry.kind} '{entry.name}' ({entry.distribution} {entry.version})"
    try:
        module = importlib.import_module(entry.module)
    except Exception as error:  # a plugin's module may raise anything; its name must be in the message
        raise UserError(f"{what} is broken: importing {entry.module} raised {type(error).__name__}: {error}") from error
    try:
        return getattr(module, entry.attribute)
    except AttributeError:
        raise UserError(f"{what} is broken: {entry.module} has no {entry.attribute}") from None


def _check(entry: Entry, cls: object, contract: type[Plugin]) -> type[Plugin]:
    what = f"{entry.kind} '{entry.name}' ({entry.distribution} {entry.version})"
    if not (isinstance(cls, type) and issubclass(cls, contract)):
        raise UserError(f"{what} is no {contract.__name__}: derive {entry.attribute} from {contract.__module__}.{contract.__name__}")
    if cls.api not in contract.supported_api:
        newest = max(contract.supported_api)
        remedy = "upgrade fw" if cls.api > newest else f"upgrade {entry.distribution}"
        raise UserError(f"{what} was written for api {cls.api} of kind '{entry.kind}', this fw speaks {newest}; {remedy}")
    if not dataclasses.is_dataclass(cls.Config):
        raise UserError(f"{what} is broken: its Config is no dataclass")
    return cls
