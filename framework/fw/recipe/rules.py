"""Checking what plugins declare of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fw.config import Config
from fw.errors import UserError
from fw.registry import Plugin


def check(chosen: Mapping[str, Sequence[tuple[str, Plugin]]], config: Config) -> None:
    """Refuse the first broken rule.

    Args:
        chosen: by kind, the names and plugins of the recipe.

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
                names = [other for other, _ in chosen.get(need.kind, ())]
                if not any(other in need.names for other in names):
                    wanted = " or ".join(f"'{n}'" for n in need.names)
                    raise UserError(
                        f"{place}: {kind} '{name}' needs {need.kind} {wanted}, because {need.because};"
                        f" the config has {' and '.join(names) or 'none'}"
                    )
