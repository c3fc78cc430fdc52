"""Sharded safetensors in the Hugging Face layout, with optimizer and trainer state beside the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fw.api import CausalLM, CheckpointOptions, Give, Part, Ranks, UserError, Writes, parse_size
from fw.api.checkpointing import (
    ADAPTER,
    AVERAGE,
    LANES,
    Layout,
    PlacedTensors,
    StepDirectories,
    StepReader,
    TensorFiles,
    Writing,
    adapter_for,
    dealt,
    has_tensors,
    is_divided,
    size_bytes,
    split_groups,
    weights_for,
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


class SafetensorsReader(StepReader):
    """Reads slices: of mapped files where they are local, else by requests for the bytes."""

    def weights(self, model: CausalLM) -> Give:
        """All of the model, or of its adapters, and nothing else must be in the files."""
        if model.adapters is None:
            return weights_for(TensorFiles(self.place), model)
        return adapter_for(TensorFiles(self.place, ADAPTER), model)

    def average(self, model: CausalLM) -> Give | None:
        """As weights are, in files of their own."""
        if not has_tensors(self.place, AVERAGE):
            return None
        files = TensorFiles(self.place, AVERAGE)
        return weights_for(files, model) if model.adapters is None else adapter_for(files, model)

    def optimizer(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Every tensor, placed like its parameter where it has that shape."""
        return PlacedTensors(TensorFiles(self.place, "optimizer"), parameters)


class SafetensorsCheckpoint(StepDirectories):
    """Sharded safetensors that transformers loads as they are; written aside, hashed, made durable, then renamed."""

    api = 1
    Config = SafetensorsConfig
    config: SafetensorsConfig
    reader = SafetensorsReader

    def writing(self, tensors: Mapping[str, Mapping[str, Part]], layout: Layout, ranks: Ranks) -> Writing:
        """Every rank writes the files assigned to it, two at a time."""
        return Writing(tensors, layout, ranks, parse_size(self.config.max_shard_size))

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
