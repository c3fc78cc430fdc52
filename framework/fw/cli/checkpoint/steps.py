"""Actions on checkpoints as a run writes them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fw.bars import Bar
from fw.errors import EXIT_FAILED, EXIT_OK, RunError, UserError

_LISTED = 20


def add_actions(actions: Any) -> None:
    """``verify``, ``prune``, ``reshard`` and ``diff``."""
    verify = actions.add_parser("verify", help="read everything and compare it with what was written; exit code 1 if anything differs")
    verify.add_argument("directory", metavar="DIR", help="step directory, or a run or directory of checkpoints: then all of them")
    verify.set_defaults(act=_verify)

    prune = actions.add_parser("prune", help="remove checkpoints that no --keep option asks to keep; the one 'latest' means always stays")
    prune.add_argument("directory", metavar="DIR", help="run directory or directory of checkpoints")
    prune.add_argument("--keep-last", metavar="N", type=int, required=True, help="the newest")
    prune.add_argument("--keep-every", metavar="N", type=int, default=0, help="and those whose step is a multiple of N")
    prune.add_argument("--keep-best", metavar="N", type=int, default=0, help="and the best by --metric")
    prune.add_argument("--metric", default="val_loss", help="val_loss or loss (val_loss)")
    prune.add_argument("--mode", choices=("min", "max"), default="min", help="which is good (min)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    prune.set_defaults(act=_prune)

    reshard = actions.add_parser("reshard", help="write a checkpoint once more, in files of another size, with all its state")
    reshard.add_argument("directory", metavar="RUN_OR_STEP", help="run directory (its newest checkpoint) or step directory")
    reshard.add_argument("--to", metavar="DIR", required=True, help="directory of checkpoints in which to write the step")
    reshard.add_argument("--max-shard-size", metavar="SIZE", default="5GiB", help="a file is closed before it grows beyond this (5GiB)")
    reshard.set_defaults(act=_reshard)

    diff = actions.add_parser("diff", help="what two checkpoints or model directories differ in; exit code 1 if they do")
    diff.add_argument("one", metavar="DIR", help="run, step or model directory")
    diff.add_argument("other", metavar="DIR", help="run, step or model directory")
    diff.set_defaults(act=_diff)
    for action in (verify, prune, reshard, diff):
        action.add_argument("--json", action="store_true", help="print JSON, sizes in bytes")


def _verify(options: argparse.Namespace) -> int:
    from fw.checkpointing import commit
    from fw.checkpointing.manifest import damages, read_manifest, strangers
    from fw.config import format_size
    from fw.place import place

    found = []
    for step in commit.steps_at(place(options.directory)):
        entry: dict[str, Any] = {"checkpoint": str(step), "step": None, "files": 0, "bytes": 0, "problems": []}
        try:
            manifest = read_manifest(step)
        except UserError as error:
            entry["problems"] = [str(error)]
        else:
            entry |= {"step": manifest.facts.get("step"), "files": len(manifest.files) + 1, "bytes": manifest.size}
            with _bar(f"verifying {step.name}", manifest.size) as progress:
                entry["problems"] = damages(step, manifest, progress=progress)
            entry["problems"] += [f"{name} is not one of its files" for name in strangers(step, manifest)]
        found.append(entry)
        if not options.json:
            state = f"whole  {entry['files']} files, {format_size(entry['bytes'])}" if not entry["problems"] else "DAMAGED"
            print(f"{step}  {state}", *(f"  {problem}" for problem in entry["problems"]), sep="\n")
    if options.json:
        print(json.dumps({"whole": not any(entry["problems"] for entry in found), "checkpoints": found}, indent=1))
    return EXIT_FAILED if any(entry["problems"] for entry in found) else EXIT_OK


def _prune(options: argparse.Namespace) -> int:
    from fw.checkpointing import commit
    from fw.checkpointing.retention import prune
    from fw.kinds.checkpoint import CheckpointOptions
    from fw.place import place

    if options.keep_last < 1:
        raise UserError(f"--keep-last {options.keep_last}: at least the newest checkpoint stays; give 1 or more")
    keep = CheckpointOptions(
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        keep_best=options.keep_best,
        metric=options.metric,
        mode=options.mode,
    )
    given = place(options.directory)
    steps = commit.steps_at(given)
    directory = given if commit.steps(given) else given / "checkpoints"
    try:
        gone = prune(directory, keep, options.dry_run)
    except OSError as error:
        raise RunError(f"{directory}: not all could be removed: {error.strerror or error}") from None
    if options.json:
        print(json.dumps({"directory": str(directory), "removed": gone, "dry_run": options.dry_run}, indent=1))
    else:
        verb = "would remove" if options.dry_run else "removed"
        print(f"{directory}: {verb} {len(gone)} of {len(steps)} checkpoints{': ' + ', '.join(gone) if gone else ''}")
    return EXIT_OK


def _reshard(options: argparse.Namespace) -> int:
    from fw.checkpointing import commit
    from fw.checkpointing.manifest import read_manifest
    from fw.checkpointing.rewriting import reshard
    from fw.config import format_size, parse_size
    from fw.place import place

    max_bytes = parse_size(options.max_shard_size)
    if max_bytes < 1:
        raise UserError(f"--max-shard-size {options.max_shard_size} is too small")
    step = commit.steps_at(place(options.directory))[0]
    to = place(options.to)
    if str(to / step.name) == str(step):
        raise UserError(f"--to {to}: the checkpoint would replace itself; give another directory")
    with _bar(f"resharding {step.name}", 2 * read_manifest(step).size) as progress:
        made = reshard(step, to, max_bytes, progress)
    files = {name: size for name, size in made.files().items() if name.endswith(".safetensors")}
    if options.json:
        print(json.dumps({"checkpoint": str(made), "files": files}, indent=1))
    else:
        print(f"{made}: {len(files)} files of tensors, {format_size(sum(files.values()))}")
    return EXIT_OK


def _diff(options: argparse.Namespace) -> int:
    from fw.checkpointing.comparing import compare
    from fw.pretrained.export import locate_any

    one, other = locate_any(options.one), locate_any(options.other)
    total = sum(size for name, size in one.files().items() if name.endswith(".safetensors"))
    with _bar("comparing", total) as progress:
        found = compare(one, other, progress)
    if options.json:
        changed = {
            name: {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in what.items()}
            for name, what in found.changed.items()
        }
        print(json.dumps({"identical": found.identical, "only": found.only, "changed": changed, "state": found.state}, indent=1))
        return EXIT_OK if found.is_empty else EXIT_FAILED
    print(f"{found.identical:,} tensors identical, {len(found.changed):,} different")
    for group, sides in found.only.items():
        for side, names in sides.items():
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            print(f"{group}: only in the {side}: {', '.join(names[:_LISTED])}{more}")
    by_size = sorted(found.changed.items(), key=lambda entry: _descending(entry[1].get("relative", math.inf)))
    for name, what in by_size[:_LISTED]:
        print(f"{name}: {_describe(what)}")
    if len(by_size) > _LISTED:
        print(f"and {len(by_size) - _LISTED} tensors more, which differ less (--json lists all)")
    for key, (before, after) in found.state.items():
        print(f"state: {key}: {json.dumps(before)} → {json.dumps(after)}")
    return EXIT_OK if found.is_empty else EXIT_FAILED


def _descending(relative: float) -> float:
    """What is no number comes first."""
    return -math.inf if math.isnan(relative) else -relative


def _describe(what: dict[str, Any]) -> str:
    if "shapes" in what:
        return f"shapes {what['shapes'][0]} and {what['shapes'][1]}"
    dtypes = f"{' and '.join(what['dtypes'])}, " if "dtypes" in what else ""
    return f"{dtypes}largest difference {what['largest']:.3g}, mean {what['mean']:.3g}, relative {what['relative']:.3g}"


@contextmanager
def _bar(text: str, total: int) -> Iterator[Callable[[int], object]]:
    with Bar(total=total, desc=text, unit="B", unit_scale=True) as bar:
        yield bar.update
