"""Sharded safetensors in the Hugging Face layout, with optimizer and trainer state beside the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from fw.checkpointing import commit
from fw.checkpointing.stream import Digest, SafetensorsWriter, index, split
from fw.checkpointing.tensor_files import TensorFiles, weights_for
from fw.config import parse_size
from fw.errors import RunError, UserError
from fw.kinds.checkpoint import CheckpointPlugin, Gathered, Part, Reader, Snapshot
from fw.kinds.model import CausalLM, Give

STATE = "trainer.json"
RNG = "rng.safetensors"


@dataclass
class SafetensorsConfig:
    """How large the files are."""

    max_shard_size: str = "5GiB"
    """A file is closed before it grows beyond this; a tensor lies in one file. While saving, a rank holds one whole tensor more."""

    def __post_init__(self) -> None:
        if parse_size(self.max_shard_size) < 1:
            raise UserError(f"checkpoint.max_shard_size: {self.max_shard_size} is too small")


class SafetensorsCheckpoint(CheckpointPlugin):
    """Sharded safetensors that transformers loads as they are; written aside, hashed, made durable, then renamed."""

    api = 1
    Config = SafetensorsConfig
    config: SafetensorsConfig

    def save(self, directory: Path, snapshot: Snapshot) -> Path:
        """Write a step directory; every rank writes the files assigned to it."""
        rank, ranks = _rank()
        final = directory / f"step-{snapshot.step:08d}"
        temporary = final.with_name(f"{final.name}.tmp")
        problem = ""
        digests: dict[str, Digest] = {}
        if rank == 0:
            try:
                for left_over in directory.glob("step-*.tmp"):
                    shutil.rmtree(left_over, ignore_errors=True)
                temporary.mkdir(parents=True)
            except OSError as error:
                problem = _describe(temporary, error)
        _agree(problem, temporary)

        optimizer = {name: Part(tensor) for name, tensor in snapshot.optimizer.items()}
        for stem, tensors in (("model", snapshot.weights), ("optimizer", optimizer)):
            try:
                files = split(tensors, stem, parse_size(self.config.max_shard_size))
                digests |= _write_files(temporary, files, tensors, rank, ranks)
                if rank == 0 and len(files) > 1:
                    (temporary / f"{stem}.safetensors.index.json").write_text(json.dumps(index(files, tensors), indent=1))
            except OSError as error:
                problem = _describe(temporary, error)
            _agree(problem, temporary)

        rngs = _gather({f"rank{rank}.{name}": tensor for name, tensor in snapshot.rng.items()})
        all_digests = _gather(digests)
        if rank == 0:
            try:
                save_file({k: v for part in rngs for k, v in part.items()}, temporary / RNG)
                (temporary / STATE).write_text(json.dumps(dict(snapshot.state), indent=1) + "\n")
                snapshot.write_files(temporary)
                known = {name: digest for part in all_digests for name, digest in part.items()}
                commit.write_manifest(temporary, known, {"step": snapshot.step, "world_size": ranks})
                commit.publish(temporary, final)
            except Exception as error:  # libraries that write for us raise errors of their own kinds; the other ranks must hear of any
                problem = _describe(temporary, error)
        _agree(problem, temporary)
        return final

    def latest(self, directory: Path) -> Path | None:
        """Where ``latest`` points, else the last whole step directory."""
        link = directory / "latest"
        if (link / commit.MANIFEST).is_file():
            return link.resolve()
        steps = sorted(p for p in directory.glob("step-*") if p.suffix != ".tmp" and (p / commit.MANIFEST).is_file())
        return steps[-1] if steps else None

    def open(self, path: Path) -> Reader:
        """Check the manifest and open the files for mapping."""
        if not path.is_dir():
            raise UserError(f"{path} is no checkpoint: no such directory")
        return SafetensorsReader(path.resolve())


def _write_files(directory: Path, files: Mapping[str, list[str]], tensors: Mapping[str, Part], rank: int, ranks: int) -> dict[str, Digest]:
    """Write this rank's files. Gathering is collective, so a rank whose disk fails goes on gathering and reports at the end."""
    digests: dict[str, Digest] = {}
    failure: OSError | None = None
    gathered: tuple[Tensor | Gathered | None, Tensor | None] = None, None
    for number, (file, names) in enumerate(files.items()):
        writer = None
        if number % ranks == rank and failure is None:
            try:
                writer = SafetensorsWriter(directory / file, {name: tensors[name] for name in names})
            except OSError as error:
                failure = error
        for name in names:
            part = tensors[name]
            if part.tensor is not gathered[0]:  # the experts of a stack come one after another and are gathered together
                whole = part.tensor.full_tensor() if isinstance(part.tensor, DTensor | Gathered) else part.tensor
                gathered = part.tensor, whole
            if writer is not None and failure is None and gathered[1] is not None:
                try:
                    writer.write(part.whole(gathered[1]))
                except OSError as error:
                    failure = error
        if writer is not None:
            try:
                writer.close()
                digests[file] = writer.digest
            except OSError as error:
                failure = failure or error
    if failure is not None:
        raise failure
    return digests


class SafetensorsReader(Reader):
    """Reads slices from memory-mapped files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        commit.read_manifest(path)

    def verify(self) -> None:
        """Compare every file with the manifest's digests."""
        commit.verify(self.path)

    def weights(self, model: CausalLM) -> Give:
        """All of the model and nothing else must be in the files."""
        return weights_for(TensorFiles(self.path), model)

    def optimizer(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Every tensor, placed like its parameter where it has that shape."""
        return _PlacedTensors(TensorFiles(self.path, "optimizer"), parameters)

    def state(self) -> dict[str, Any]:
        """The trainer's JSON."""
        state: dict[str, Any] = json.loads((self.path / STATE).read_text())
        return state

    def rng(self, rank: int) -> dict[str, Tensor]:
        """Generator states of a rank."""
        prefix = f"rank{rank}."
        with safe_open(self.path / RNG, framework="pt") as file:
            return {name[len(prefix) :]: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


class _PlacedTensors(Mapping[str, Tensor]):
    """Tensors of a directory by ``<parameter>/<key>``, read when they are looked up."""

    def __init__(self, files: TensorFiles, parameters: Mapping[str, Tensor]) -> None:
        self._files, self._parameters = files, parameters
        for path in files.where:
            if (name := path.rpartition("/")[0]) not in parameters:
                raise RunError(f"{files.directory}: optimizer state of '{name}', which the model does not have")

    def __getitem__(self, path: str) -> Tensor:
        if path not in self._files.where:
            raise KeyError(path)
        parameter = self._parameters[path.rpartition("/")[0]]
        if self._files.shape(path) != tuple(parameter.shape):
            return self._files.whole(path).to(parameter.device)
        tensor = torch.empty_like(parameter, dtype=self._files.dtype(path), requires_grad=False)
        self._files.fill(path, Part(tensor))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files.where)

    def __len__(self) -> int:
        return len(self._files.where)


def _rank() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _describe(path: Path, error: Exception) -> str:
    return f"{path}: {getattr(error, 'strerror', None) or error}"


def _agree(problem: str, temporary: Path) -> None:
    """End the save on every rank if it failed on any, and give back the space it took."""
    problems = [p for p in _gather(problem) if p]
    if problems:
        if _rank()[0] == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise RunError(f"checkpoint not written: {problems[0]}; what was there before is untouched")
