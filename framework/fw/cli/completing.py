"""What a shell is told when it asks how a line could go on. Nothing heavy is imported for it."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

ASKS = "_ARGCOMPLETE"
"""Set in the environment by a shell that asks."""
_CONFIGS = (".yaml", ".yml")


def answer(parser: argparse.ArgumentParser) -> None:
    """Where a shell asks, tell it and end the process."""
    if ASKS not in os.environ:
        return
    import argcomplete
    from argcomplete.completers import FilesCompleter

    for action in _actions(parser):
        if action.dest == "overrides":
            action.completer = overrides  # type: ignore[attr-defined]
        elif action.dest == "config":
            action.completer = FilesCompleter(_CONFIGS)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, append_space=False)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in dict.fromkeys(action.choices.values()):
                yield from _actions(inner)
        else:
            yield action


def overrides(prefix: str, **_: Any) -> list[str]:
    """``sha`` → ``sharding=``, ``sharding=f`` → ``sharding=fsdp``, ``train.max`` → ``train.max_steps=``."""
    from fw.config import InferenceSection, LaunchSection, LoaderSection, MemorySection, ServeSection, TrainSection
    from fw.kinds import KINDS
    from fw.registry import entries

    sections = {
        "inference": InferenceSection,
        "launch": LaunchSection,
        "loader": LoaderSection,
        "memory": MemorySection,
        "serve": ServeSection,
        "train": TrainSection,
    }
    name, given, _value = prefix.partition("=")
    if given:
        return [f"{name}={entry.name}" for entry in entries(name)] if name in KINDS else []
    section, dot, _rest = name.partition(".")
    if dot:
        return [f"{section}.{field.name}=" for field in dataclasses.fields(sections[section])] if section in sections else []
    return [*(f"{kind}=" for kind in KINDS), *(f"{each}." for each in sections)]
