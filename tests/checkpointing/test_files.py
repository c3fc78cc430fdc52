"""Files, manifests and commits."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from fw.checkpointing import commit
from fw.checkpointing.stream import SafetensorsWriter, index, split
from fw.errors import RunError, UserError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "scalar": torch.tensor(3.5),
    "half": torch.randn(4, dtype=torch.bfloat16),
    "empty": torch.empty(0, 7),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "strided": torch.arange(12, dtype=torch.int64).reshape(3, 4).T,
}


def test_safetensors_reads_what_is_streamed(tmp_path):
    writer = SafetensorsWriter(tmp_path / "x.safetensors", TENSORS)
    for tensor in TENSORS.values():
        writer.write(tensor)
    writer.close()
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
    assert writer.digest == commit.hash_file(tmp_path / "x.safetensors")


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


@pytest.fixture
def published(tmp_path):
    def publish(step: int):
        temporary = tmp_path / f"step-{step}.tmp"
        temporary.mkdir()
        (temporary / "weights.bin").write_bytes(bytes([step]) * 1000)
        (temporary / "state.json").write_text("{}")
        commit.write_manifest(temporary, {}, {"step": step})
        commit.publish(temporary, tmp_path / f"step-{step}")
        return tmp_path / f"step-{step}"

    return publish


def test_a_published_directory_is_whole_and_latest_points_to_it(published, tmp_path):
    for step in (1, 2):
        path = published(step)
        commit.verify(path)
        assert (tmp_path / "latest").resolve() == path
        assert (tmp_path / "latest").readlink().as_posix() == path.name
    assert published(2) and not list(tmp_path.glob("*.tmp"))  # the same step again replaces it


def test_damage_is_named(published):
    path = published(1)
    data = bytearray((path / "weights.bin").read_bytes())
    data[500] ^= 1
    (path / "weights.bin").write_bytes(data)
    with pytest.raises(RunError, match=r"weights\.bin has other bytes"):
        commit.verify(path)
    (path / "weights.bin").write_bytes(data[:-1])
    (path / "state.json").unlink()
    with pytest.raises(RunError, match=r"state\.json is missing; weights\.bin has 999 bytes instead of 1000"):
        commit.verify(path)


@pytest.mark.parametrize("edit", [lambda text: text[:-5], lambda text: text.replace('"step": 1', '"step": 7')])
def test_a_damaged_manifest_is_found(published, edit):
    path = published(1)
    (path / commit.MANIFEST).write_text(edit((path / commit.MANIFEST).read_text()))
    with pytest.raises(UserError, match="no whole checkpoint"):
        commit.read_manifest(path)


def test_no_manifest_and_a_newer_format(published):
    path = published(1)
    body = json.loads((path / commit.MANIFEST).read_text())
    (path / commit.MANIFEST).write_text(json.dumps({**body, "format": 99}))
    with pytest.raises(UserError, match="format 99, this fw reads up to 1; upgrade fw"):
        commit.read_manifest(path)
    (path / commit.MANIFEST).unlink()
    with pytest.raises(UserError, match="is no checkpoint: it has no manifest"):
        commit.read_manifest(path)
