"""What formats of files in step directories share: a save is written aside, hashed, made durable, then renamed."""

from __future__ import annotations

import json
import tempfile
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fw.checkpointing import commit
from fw.checkpointing.manifest import Digest, damages, hash_file, read_manifest, strangers, write_manifest
from fw.checkpointing.pieces import Layout
from fw.checkpointing.retention import prune
from fw.checkpointing.state import RNG, STATE, read_rng
from fw.checkpointing.writing import distinct
from fw.errors import RunError, UserError
from fw.kinds.checkpoint import Beat, CheckpointOptions, CheckpointPlugin, Part, Ranks, Reader, Snapshot
from fw.place import Place


class TensorWriting(Protocol):
    """The tensors of one save on their way into files. On every rank alike."""

    def run(self, directory: Place, beat: Beat) -> Mapping[str, Digest]:
        """Write this rank's files, and give other ranks what they need for theirs; durable when this returns.

        Raises:
            OSError: they cannot be written.
        """

    def indices(self) -> Mapping[str, bytes]:
        """Files that say which tensor is where, by name; the first rank writes them."""


class StepReader(Reader):
    """Reads a step directory that has a manifest: all but its tensors."""

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

    def state(self) -> dict[str, Any]:
        """The trainer's JSON."""
        state: dict[str, Any] = json.loads(self.place.read(STATE))
        return state

    def rng(self, rank: int) -> dict[str, Any]:
        """Generator states of a rank."""
        return read_rng(self.place, rank)


class StepDirectories(CheckpointPlugin):
    """A format of files in step directories. One that derives from it says how tensors become files, and what reads them.

    Attributes:
        reader: of a step directory.
    """

    reader: ClassVar[type[StepReader]]

    def __init__(self, config: CheckpointOptions) -> None:
        super().__init__(config)
        self._layout: Layout | None = None

    @abstractmethod
    def writing(self, tensors: Mapping[str, Mapping[str, Part]], layout: Layout, ranks: Ranks) -> TensorWriting:
        """How the tensors of a save become files. Called on every rank.

        Args:
            tensors: as in a :class:`Snapshot`.
            layout: which rank has what of them.
        """

    def save(self, directory: Place, snapshot: Snapshot, ranks: Ranks) -> Place:
        """Write a step directory: every rank its files, the first one the manifest, and then the name."""
        name = commit.step_name(snapshot.step)
        what = f"checkpoint {directory / name} not written"
        try:
            return self._save(directory, name, snapshot, ranks, what)
        except RunError as error:
            kept = "what was there before" if directory.local is not None else f"what was there before, apart from {name},"
            raise RunError(f"{error}; {kept} is untouched") from error

    def _save(self, directory: Place, name: str, snapshot: Snapshot, ranks: Ranks, what: str) -> Place:
        if self._layout is None or self._layout.ranks is not ranks:
            self._layout = Layout(ranks)
        layout = self._layout
        first = ranks.rank == 0
        written = commit.draft(directory, name)

        def begin(beat: Beat) -> None:
            if first:
                commit.begin(directory, name)

        def write(beat: Beat) -> tuple[Mapping[str, Digest], Mapping[str, Any]]:
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
            writing = self.writing(snapshot.tensors, layout, ranks)
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
        return self.reader(step)

    def clean(self, directory: Place) -> None:
        """What interrupted saves left; a ``latest`` that no save could move is refused."""
        commit.check_latest(directory)
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
