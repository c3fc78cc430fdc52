"""Of sharded state on disk: what a checkpoint plugin is made of, and what may be replaced one by one."""

from fw.checkpointing import commit
from fw.checkpointing.manifest import Digest, damages, hash_file, read_manifest, strangers, write_manifest
from fw.checkpointing.pieces import Layout, is_divided
from fw.checkpointing.placed import PlacedTensors
from fw.checkpointing.retention import prune
from fw.checkpointing.state import RNG, STATE, read_rng
from fw.checkpointing.step_directories import StepDirectories, StepReader, TensorWriting
from fw.checkpointing.stream import size_bytes
from fw.checkpointing.tensor_files import ADAPTER, AVERAGE, TensorFiles, adapter_for, has_tensors, weights_for
from fw.checkpointing.writing import LANES, Writing, dealt, distinct, split_groups

__all__ = [
    "ADAPTER",
    "AVERAGE",
    "LANES",
    "RNG",
    "STATE",
    "Digest",
    "Layout",
    "PlacedTensors",
    "StepDirectories",
    "StepReader",
    "TensorFiles",
    "TensorWriting",
    "Writing",
    "adapter_for",
    "commit",
    "damages",
    "dealt",
    "distinct",
    "has_tensors",
    "hash_file",
    "is_divided",
    "prune",
    "read_manifest",
    "read_rng",
    "size_bytes",
    "split_groups",
    "strangers",
    "weights_for",
    "write_manifest",
]
