"""Files of tensors."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load_file

from fw.checkpointing.stream import SafetensorsWriter, index, split
from fw.errors import RunError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "scalar": torch.tensor(3.5),
    "half": torch.randn(4, dtype=torch.bfloat16),
    "empty": torch.empty(0, 7),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "strided": torch.arange(12, dtype=torch.int64).reshape(3, 4).T,
}


def test_safetensors_reads_what_is_streamed(tmp_path):
    writer = SafetensorsWriter(tmp_path, "x.safetensors", TENSORS)
    for tensor in TENSORS.values():
        writer.write(tensor)
    digest = writer.close()
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
    assert digest.size == (tmp_path / "x.safetensors").stat().st_size
    assert digest.sha256 == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()


def test_what_was_not_announced_makes_no_file(tmp_path):
    writer = SafetensorsWriter(tmp_path, "x.safetensors", {"a": torch.empty(4), "b": torch.empty(2)})
    with pytest.raises(RunError, match=r"'a' was to be torch\.float32 of 4 elements, and is torch\.bfloat16 of 4"):
        writer.write(torch.empty(4, dtype=torch.bfloat16))
    writer.abort()
    writer = SafetensorsWriter(tmp_path, "x.safetensors", {"a": torch.empty(4), "b": torch.empty(2)})
    writer.write(torch.empty(4))
    with pytest.raises(RunError, match="'b' was announced and not written"):
        writer.close()


def test_files_are_split_in_order_and_named_as_hugging_face_does():
    tensors = {name: torch.empty(10) for name in "abcde"}
    assert split(tensors, "model", 10**9) == {"model.safetensors": list("abcde")}
    files = split(tensors, "model", 85)
    assert files == {
        "model-00001-of-00003.safetensors": ["a", "b"],
        "model-00002-of-00003.safetensors": ["c", "d"],
        "model-00003-of-00003.safetensors": ["e"],
    }
    assert index(files, tensors)["metadata"] == {"total_size": 200}
    assert list(split({"big": torch.empty(100), "small": torch.empty(1)}, "m", 8).values()) == [["big"], ["small"]]
