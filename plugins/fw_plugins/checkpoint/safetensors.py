"""Sharded safetensors in the Hugging Face layout, with optimizer and trainer state beside the weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fw.api import (
    Beat,
    CausalLM,
    CheckpointOptions,
    CheckpointPlugin,
    Give,
    Part,
    Place,
    Ranks,
    Reader,
    RunError,
    Snapshot,
    UserError,
    Writes,
    parse_size,
)
from fw.api.checkpointing import (
    ADAPTER,
    LANES,
    RNG,
    STATE,
    Digest,
    Layout,
    PlacedTensors,
    TensorFiles,
    Writing,
    adapter_for,
    commit,
    damages,
    dealt,
    distinct,
    hash_file,
    is_divided,
    prune,
    read_manifest,
    read_rng,
    size_bytes,
    split_groups,
    strangers,
    weights_for,
    write_manifest,
)


@dataclass
class SafetensorsConfig(CheckpointOptions):
    """Where checkpoints go, when they are written, which stay, and how large their files are."""

    max_shard_size: str = "5GiB"
    """A file is closed before it grows beyond this; a tensor lies in one file. While saving, a rank holds up to two whole tensors more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if parse_size(self.max_shard_size) < 1:
            raise UserError(f"checkpoint.max_shard_size: {self.max_shard_size} is too small")


class SafetensorsCheckpoint(CheckpointPlugin):
    """Sharded safetensors that transformers loads as they are; written aside, hashed, made durable, then renamed."""

    api = 1
    Config = SafetensorsConfig
    config: SafetensorsConfig

    def __init__(self, config: SafetensorsConfig) -> None:
        super().__init__(config)
        self._layout: Layout | None = None

    def save(self, directory: Place, snapshot: Snapshot, ranks: Ranks) -> Place:
        """Write a step directory; every rank writes the files assigned to it, two at a time."""
        name = commit.step_name(snapshot.step)
        what = f"checkpoint {directory / name} not written"
        try:
            return self._save(directory, name, snapshot, ranks, what)
        except RunError as error:
            raise RunError(f"{error}; what was there before is untouched") from error

    def _save(self, directory: Place, name: str, snapshot: Snapshot, ranks: Ranks, what: str) -> Place:
        if self._layout is None or self._layout.ranks is not ranks:
            self._layout = Layout(ranks)
        layout = self._layout
        first = ranks.rank == 0
        written = commit.draft(directory, name)

        def begin(beat: Beat) -> None:
            if first:
                commit.begin(directory, name)

        def write(beat: Beat) -> tuple[dict[str, Digest], Mapping[str, Any]]:
            digests = writing.run(written, beat)
            if first:
                beat("writing what belongs to the tensors")
                for file, data in writing.indices().items():
                    written.write(file, data)
                written.write(STATE, _json(snapshot.state))
                _write_beside(snapshot, written)
            return digests, snapshot.rng

        def end(beat: Beat) -> None:
            if first:
                beat("writing the manifest")
                written.write(RNG, _json({str(rank): rng for rank, (_, rng) in enumerate(parts)}))
                files = {file: digest for digests, _ in parts for file, digest in digests.items()}
                there = written.files()
                if lost := [file for file in files if there.get(file) != files[file].size]:
                    raise RunError(f"{lost[0]} is not in {written} as it was written; do all ranks write to the same place?")
                for file in there.keys() - files.keys():
                    files[file] = hash_file(written, file)
                    beat()
                facts = {
                    "step": snapshot.step,
                    "number": commit.next_number(directory, snapshot.parent),
                    "parent": snapshot.parent,
                    "world_size": ranks.size,
                    "mesh": dict(snapshot.mesh),
                    "metrics": dict(snapshot.metrics),
                }
                write_manifest(written, files, facts)
                commit.publish(directory, written, name)

        try:
            ranks.together(what, begin)
            layout.update(distinct(snapshot.tensors))
            writing = Writing(snapshot.tensors, layout, ranks, parse_size(self.config.max_shard_size))
            parts = ranks.together(what, write)
            ranks.together(what, end)
        except RunError:
            if first:
                commit.discard(directory, name)
            raise
        return directory / name

    def found(self, directory: Place) -> list[str]:
        """The one written last, what its run had come by, then the others."""
        return commit.history(directory)

    def open(self, step: Place) -> Reader:
        """Check the manifest; files are opened when they are asked for."""
        if step.local is not None and not step.local.is_dir():
            raise UserError(f"{step} is no checkpoint: no such directory")
        return SafetensorsReader(step)

    def writes(self, tensors: Mapping[str, Mapping[str, Part]], ranks: int) -> Sequence[Writes]:
        """Whole tensors of several ranks are put together, one in each of the two files that a rank writes at a time."""
        files = split_groups(tensors, parse_size(self.config.max_shard_size))
        disk, largest = [0] * ranks, [0] * ranks * LANES
        for file, lane in dealt(tensors, files, ranks):
            stem, names = files[file]
            parts = [tensors[stem][name] for name in names]
            disk[lane % ranks] += sum(map(size_bytes, parts))
            largest[lane] = max([largest[lane], *(size_bytes(part) for part in parts if is_divided(part))])
        return [Writes(disk[rank], sum(largest[rank::ranks])) for rank in range(ranks)]

    def clean(self, directory: Place) -> None:
        """What interrupted saves left."""
        commit.clean(directory)

    def prune(self, directory: Place, keep: CheckpointOptions) -> list[str]:
        """By what manifests say; a damaged one is not counted, and stays."""
        return prune(directory, keep)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _write_beside(snapshot: Snapshot, written: Place) -> None:
    """Configuration and tokenizer, which only know how to write to a directory."""
    with tempfile.TemporaryDirectory(prefix="fw-") as made:
        snapshot.write_files(Path(made))
        for path in sorted(Path(made).rglob("*")):
            if path.is_file():
                written.write(path.relative_to(made).as_posix(), path.read_bytes())


class SafetensorsReader(Reader):
    """Reads slices: of mapped files where they are local, else by requests for the bytes."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.manifest = read_manifest(place)
        self.identity = self.manifest.digest

    def damages(self, share: tuple[int, int] = (0, 1), progress: Callable[[int], object] = lambda count: None) -> list[str]:
        """Compares every file with the manifest, the largest dealt out first."""
        rank, ranks = share
        by_size = sorted(self.manifest.files, key=lambda name: (-self.manifest.files[name].size, name))
        found = damages(self.place, self.manifest, by_size[rank::ranks], progress)
        if rank == 0:
            found += [f"{name} is not one of its files" for name in strangers(self.place, self.manifest)]
        return found

    def weights(self, model: CausalLM) -> Give:
        """All of the model, or of its adapters, and nothing else must be in the files."""
        if model.adapters is None:
            return weights_for(TensorFiles(self.place), model)
        return adapter_for(TensorFiles(self.place, ADAPTER), model)

    def optimizer(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Every tensor, placed like its parameter where it has that shape."""
        return PlacedTensors(TensorFiles(self.place, "optimizer"), parameters)

    def state(self) -> dict[str, Any]:
        """The trainer's JSON."""
        state: dict[str, Any] = json.loads(self.place.read(STATE))
        return state

    def rng(self, rank: int) -> dict[str, Any]:
        """Generator states of a rank."""
        return read_rng(self.place, rank)
