"""Which checkpoints stay."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fw.checkpointing import commit
from fw.kinds.checkpoint import CheckpointOptions
from fw.place import Place


@dataclass(frozen=True)
class Written:
    """A checkpoint as retention sees it."""

    name: str
    step: int
    metrics: Mapping[str, float]


def superfluous(written: Sequence[Written], keep: CheckpointOptions, needed: str | None = None) -> list[str]:
    """Names of those that no option asks to keep, oldest first.

    Args:
        written: in the order of writing.
        needed: stays whatever the options say.
    """
    if not keep.keep_last:
        return []
    stay = {checkpoint.name for checkpoint in written[-keep.keep_last :]} | {needed}
    if keep.keep_every:
        stay |= {checkpoint.name for checkpoint in written if checkpoint.step % keep.keep_every == 0}
    if keep.keep_best:
        sign = 1 if keep.mode == "min" else -1
        measured = [checkpoint for checkpoint in written if math.isfinite(checkpoint.metrics.get(keep.metric, math.nan))]
        measured.sort(key=lambda checkpoint: sign * checkpoint.metrics[keep.metric])  # of equals, the older one is the better
        stay |= {checkpoint.name for checkpoint in measured[: keep.keep_best]}
    return [checkpoint.name for checkpoint in written if checkpoint.name not in stay]


def prune(directory: Place, keep: CheckpointOptions, dry_run: bool = False) -> list[str]:
    """Remove what the options do not ask to keep.

    Raises:
        OSError: it cannot be removed.
    """
    if not keep.keep_last:
        return []
    manifests = {name: manifest for name, manifest in commit.manifests(directory).items() if manifest is not None}
    ordered = sorted(manifests, key=lambda name: (manifests[name].facts.get("number", 0), name))
    written = [Written(name, int(manifests[name].facts["step"]), manifests[name].facts.get("metrics", {})) for name in ordered]
    names = superfluous(written, keep, commit.latest(directory))
    for name in [] if dry_run else names:
        commit.remove(directory, name)
    return names
