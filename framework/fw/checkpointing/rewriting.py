"""Checkpoints read and written by one process: into files of another size, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fw.checkpointing import commit
from fw.checkpointing.manifest import MANIFEST, damages, hash_file, read_manifest, write_manifest
from fw.checkpointing.pieces import Layout
from fw.checkpointing.ranks import OneRank
from fw.checkpointing.tensor_files import ADAPTER, AVERAGE, TensorFiles, has_tensors
from fw.checkpointing.writing import Writing, distinct
from fw.errors import RunError
from fw.kinds.checkpoint import Beat, Kept, Part, Piece
from fw.place import Place

GROUPS = ("model", ADAPTER, AVERAGE, "optimizer")
"""Stems of the files of tensors."""


class Stored(Kept):
    """A tensor of files, read when its turn comes."""

    def __init__(self, files: TensorFiles, name: str) -> None:
        self.shape, self.dtype = torch.Size(files.shape(name)), files.dtype(name)
        self._files, self._name = files, name

    def piece(self) -> Piece:
        """All of it."""
        return Piece(tuple(slice(0, size) for size in self.shape), self._read)

    def _read(self) -> Tensor:
        return self._files.whole(self._name)


def reshard(step: Place, to: Place, max_bytes: int, progress: Callable[[int], object] = lambda count: None) -> Place:
    """Write a checkpoint once more, its tensors in files of another size; everything else is copied.

    Args:
        to: directory of checkpoints, in which the step gets the name it has.
        progress: hears of bytes read and written.

    Returns:
        the new step.

    Raises:
        UserError: ``step`` is no checkpoint.
        RunError: it is damaged, or the new one could not be written.
    """
    manifest = read_manifest(step)
    if wrong := damages(step, manifest, progress=progress):
        raise RunError(f"checkpoint {step} is damaged: {'; '.join(wrong)}")
    tensors = {stem: {name: Part(Stored(files, name)) for name in files.where} for stem, files in groups_of(step).items()}
    rest = [name for name in manifest.files if not name.endswith((".safetensors", ".safetensors.index.json"))]
    rest += [name for name in ("rng.safetensors",) if name in manifest.files]
    return write_step(to, tensors, {name: step.read(name) for name in rest}, manifest.facts, max_bytes, progress)


def groups_of(step: Place) -> dict[str, TensorFiles]:
    """The tensors of a step, by the stem of their files."""
    return {stem: TensorFiles(step, stem) for stem in GROUPS if has_tensors(step, stem)}


def write_step(
    directory: Place,
    tensors: Mapping[str, Mapping[str, Part]],
    files: Mapping[str, bytes],
    facts: Mapping[str, Any],
    max_bytes: int,
    progress: Callable[[int], object] = lambda count: None,
) -> Place:
    """Write a checkpoint from one process, as a run does: aside, hashed, made durable, then renamed.

    Args:
        tensors: by the stem of their files and by name.
        files: everything else, by name.
        facts: for the manifest, ``step`` among them.
        max_bytes: of a file of tensors.

    Raises:
        RunError: it could not be written; what was there before is untouched.
    """
    name = commit.step_name(int(facts["step"]))
    written = commit.draft(directory, name)
    ranks = OneRank()

    def work(beat: Beat) -> None:
        commit.begin(directory, name)
        layout = Layout(ranks)
        layout.update(distinct(tensors))
        writing = Writing(tensors, layout, ranks, max_bytes)
        digests = writing.run(written, _Counting(progress))
        for file, data in {**writing.indices(), **files}.items():
            if file != MANIFEST:
                written.write(file, data)
                digests[file] = hash_file(written, file)
        write_manifest(written, digests, {**facts, "number": commit.next_number(directory)})
        commit.publish(directory, written, name)

    try:
        ranks.together(f"checkpoint {directory / name} not written", work)
    except RunError:
        commit.discard(directory, name)
        raise
    return directory / name


class _Counting(Beat):
    """Tells a progress bar of each block."""

    failed = False

    def __init__(self, progress: Callable[[int], object]) -> None:
        self._progress = progress

    def __call__(self, doing: str = "", size: int = 0) -> None:
        """``size`` bytes were written."""
        if size:
            self._progress(size)
