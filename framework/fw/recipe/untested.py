"""Pairs of plugins that nobody has seen together: of those of other distributions, since fw's own are tested with each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from fw import registry
from fw.kinds import KINDS
from fw.registry import Plugin

_COMPUTE = frozenset(
    ("model", "quantization", "peft", "attention", "objective", "precision", "sharding", "activation", "offload", "optimizer", "kv_cache")
)
"""Kinds that change what others of them compute, or where; data, schedule and those that watch meet nobody but what they are made for."""
_USUAL = {"model": "llama"}
"""Beside each kind's default what the tests of a plugin's kind run it with."""


def untested(chosen: Mapping[str, Sequence[tuple[str, Plugin]]]) -> Iterator[str]:
    """A sentence for each plugin of another distribution that stands beside others than the usual ones.

    Args:
        chosen: by kind, the names and plugins of a recipe.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for kind, other_kind in permutations((kind for kind in chosen if kind in _COMPUTE), 2):
        for name, plugin in chosen[kind]:
            if registry.from_elsewhere(kind, name) is None:
                continue
            for other, other_plugin in chosen[other_kind]:
                usual = other in (KINDS[other_kind].default, _USUAL.get(other_kind))
                said = other in plugin.tested_with.get(other_kind, ()) or name in other_plugin.tested_with.get(kind, ())
                told = f"{kind} '{name}'" in found.get((other_kind, other), ())
                if not (usual or said or told):
                    found.setdefault((kind, name), []).append(f"{other_kind} '{other}'")
    for (kind, name), others in found.items():
        distribution = registry.from_elsewhere(kind, name)
        yield f"{kind} '{name}' of {distribution} is not known to have been tested with {', '.join(others)}"
