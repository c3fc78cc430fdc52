"""Checking what plugins declare of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fw.config import Config
from fw.errors import UserError
from fw.kinds import KINDS
from fw.recipe.untested import untested
from fw.registry import Plugin


def check(chosen: Mapping[str, Sequence[tuple[str, Plugin]]], config: Config) -> None:
    """Refuse the first broken rule.

    Args:
        chosen: by kind, the names and plugins of the recipe. What is required of a kind that is not there is not: generating has no
            optimizer.

    Raises:
        UserError: two plugins conflict, or one lacks what it requires; the sentence has both, the reason and the way out.
    """
    for kind, plugins in chosen.items():
        for name, plugin in plugins:
            place = config.origin((kind,))
            for rule in plugin.conflicts:
                for other, _ in chosen.get(rule.kind, ()):
                    if other in rule.names:
                        raise UserError(f"{place}: {kind} '{name}' does not work with {rule.kind} '{other}', because {rule.because}")
            for need in plugin.requires:
                if need.kind not in chosen:
                    continue
                names = [other for other, _ in chosen.get(need.kind, ())]
                if not any(other in need.names for other in names):
                    wanted = " or ".join(f"'{n}'" for n in need.names)
                    raise UserError(
                        f"{place}: {kind} '{name}' needs {need.kind} {wanted}, because {need.because};"
                        f" the config has {' and '.join(names) or 'none'}"
                    )


def check_deterministic(chosen: Mapping[str, Sequence[tuple[str, Plugin]]], config: Config) -> None:
    """Refuse what says of itself that runs with it differ; the arguments are those of :func:`check`.

    Raises:
        UserError: with what would do.
    """
    for kind, plugins in chosen.items():
        for name, plugin in plugins:
            if plugin.differs_because:
                place = config.origin(("train", "deterministic"))
                raise UserError(
                    f"{place}: train.deterministic: {kind} '{name}' may differ from run to run, because {plugin.differs_because}"
                )


def advice(chosen: Mapping[str, Sequence[tuple[str, Plugin]]]) -> tuple[str, ...]:
    """What there is to know of plugins that work and yet are of yesterday, or that nobody has seen together, a sentence each; the argument
    is that of :func:`check`."""
    found = ((kind, name, KINDS[kind].apis.advice(kind, plugin.api)) for kind, plugins in chosen.items() for name, plugin in plugins)
    return (*(f"{kind} '{name}' {text}" for kind, name, text in found if text), *untested(chosen))
