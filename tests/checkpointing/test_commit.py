"""Manifests, commits and what stays: on a disk, in memory behind fsspec, and on an S3 server."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
from pathlib import Path

import pytest

from fw.checkpointing import commit
from fw.checkpointing.manifest import FORMAT, MANIFEST, Digest, damages, hash_file, read_manifest, strangers, write_manifest
from fw.checkpointing.retention import Written, superfluous
from fw.errors import UserError
from fw.kinds.checkpoint import CheckpointOptions, NewerFormatError
from fw.place import LocalPlace, Place, place
from fw_plugins.checkpoint.safetensors import SafetensorsCheckpoint, SafetensorsConfig


@pytest.fixture(params=["file", "memory", "s3"])
def directory(request, tmp_path) -> Place:
    if request.param == "s3":
        return place(f"{request.getfixturevalue('bucket')}/{tmp_path.name}/checkpoints")
    made = place(tmp_path / "checkpoints") if request.param == "file" else place(f"memory://{tmp_path.name}/checkpoints")
    if made.local is not None:
        made.local.mkdir()
    return made


def save(directory: Place, step: int, content: bytes = b"", **facts: object) -> Place:
    name = commit.step_name(step)
    commit.begin(directory, name)
    written = commit.draft(directory, name)
    written.write("weights.bin", content or bytes([step]) * 1000)
    written.write("inside/state.json", b"{}")
    files = {file: hash_file(written, file) for file in written.files()}
    write_manifest(written, files, {"step": step, "number": commit.next_number(directory), **facts})
    commit.publish(directory, written, name)
    return directory / name


def test_what_has_a_name_is_whole_and_latest_means_the_last_one(directory):
    for step in (1, 2, 2):  # the same step again replaces it
        path = save(directory, step)
        manifest = read_manifest(path)
        assert damages(path, manifest) == [] and manifest.format == FORMAT
        assert manifest.files["weights.bin"] == Digest(1000, hashlib.sha256(bytes([step]) * 1000).hexdigest())
        assert commit.latest(directory) == path.name
    assert commit.steps(directory) == ["step-00000001", "step-00000002"] == commit.history(directory)[::-1]
    assert not [name for name in directory.names() if name.endswith(".tmp")]
    if directory.local is not None:
        assert os.readlink(directory.local / "latest") == "step-00000002"


def test_what_was_not_finished_has_no_name_and_is_cleared(directory):
    save(directory, 1)
    commit.begin(directory, "step-00000002")
    commit.draft(directory, "step-00000002").write("weights.bin", b"half")
    assert commit.history(directory) == ["step-00000001"] and commit.latest(directory) == "step-00000001"
    assert len(commit.clean(directory)) == 1
    assert [name for name in directory.names() if name.startswith("step-")] == ["step-00000001"]
    commit.remove(directory, "step-00000001")
    assert commit.history(directory) == [] and commit.latest(directory) is None


def test_a_step_that_is_being_replaced_is_there_or_not_but_never_half(directory):
    save(directory, 1)
    commit.begin(directory, "step-00000001")
    if directory.local is not None:
        assert damages(directory / "step-00000001", read_manifest(directory / "step-00000001")) == []
    else:
        assert commit.history(directory) == []


def test_damage_is_named(directory):
    path = save(directory, 1)
    manifest = read_manifest(path)
    data = bytearray(path.read("weights.bin"))
    data[500] ^= 1
    path.write("weights.bin", bytes(data))
    assert damages(path, manifest) == ["weights.bin has other bytes than were written"]
    path.write("weights.bin", bytes(data[:-1]))
    path.remove("inside/state.json")
    assert damages(path, manifest) == ["inside/state.json is missing", "weights.bin has 999 bytes instead of 1000"]
    path.write("optimizer.safetensors", b"of another step")
    assert strangers(path, manifest) == ["optimizer.safetensors"]


def test_every_flipped_byte_and_every_cut_of_a_manifest_is_found(tmp_path):
    path = save(place(tmp_path), 1, mesh={"shard": 2}, metrics={"loss": 1.5})
    data = path.read(MANIFEST)
    for at in range(len(data)):
        for changed in (data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :], data[:at]):
            path.write(MANIFEST, changed)
            with pytest.raises(UserError, match="no whole checkpoint"):
                read_manifest(path)
    path.write(MANIFEST, data + b" ")
    with pytest.raises(UserError, match="no whole checkpoint"):
        read_manifest(path)


def test_formats_older_newer_and_none(tmp_path):
    path = save(place(tmp_path), 1)
    body = json.loads(path.read(MANIFEST))
    old = {**body, "format": 1, "sha256": ""}
    old["sha256"] = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()
    path.write(MANIFEST, (json.dumps(old, indent=1) + "\n").encode())
    assert read_manifest(path).format == 1 and damages(path, read_manifest(path)) == []
    text = json.dumps({**body, "format": 99, "sha256": "0" * 64}, indent=1) + "\n"
    path.write(MANIFEST, text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()).encode())
    with pytest.raises(NewerFormatError, match=f"format 99, this fw reads up to {FORMAT}; upgrade fw"):
        read_manifest(path)
    path.remove(MANIFEST)
    with pytest.raises(UserError, match="is no checkpoint: it has no manifest"):
        read_manifest(path)


def test_a_run_goes_on_along_its_own_past(tmp_path):
    directory = place(tmp_path)
    save(directory, 4)
    save(directory, 8, parent="step-00000004")
    save(directory, 6, parent="step-00000004")  # after going back to 4
    assert commit.history(directory) == ["step-00000006", "step-00000004", "step-00000008"]
    path = directory / "step-00000006"
    path.write(MANIFEST, path.read(MANIFEST)[:-9])
    assert set(commit.history(directory)) == {"step-00000004", "step-00000006", "step-00000008"}
    assert commit.history(directory)[0] == "step-00000008"


def test_a_latest_that_means_nothing_is_no_latest(tmp_path):
    directory = place(tmp_path)
    assert commit.latest(directory) is None
    (tmp_path / "latest").symlink_to("step-00000009")
    assert commit.latest(directory) is None
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").write_bytes(b"\xff\x00../../etc")
    assert commit.latest(directory) is None


WRITTEN = [
    Written(f"step-{step}", step, {"val_loss": loss}) for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 1.0), (50, float("nan")))
]


@pytest.mark.parametrize(
    ("options", "stay"),
    [
        ({}, [10, 20, 30, 40, 50]),
        ({"keep_last": 1}, [50]),
        ({"keep_last": 9}, [10, 20, 30, 40, 50]),
        ({"keep_last": 2, "keep_every": 20}, [20, 40, 50]),
        ({"keep_last": 1, "keep_best": 1}, [20, 50]),
        ({"keep_last": 1, "keep_best": 2}, [20, 40, 50]),
        ({"keep_last": 1, "keep_best": 1, "mode": "max"}, [10, 50]),
        ({"keep_last": 1, "keep_best": 2, "metric": "loss"}, [50]),
    ],
)
def test_what_stays(options, stay):
    gone = superfluous(WRITTEN, CheckpointOptions(**options))
    assert [w.step for w in WRITTEN if w.name not in gone] == stay


def test_what_latest_means_stays():
    assert "step-10" not in superfluous(WRITTEN, CheckpointOptions(keep_last=1), needed="step-10")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep_every": 5}, "set keep_last too"),
        ({"keep_best": 5}, "set keep_last too"),
        ({"keep_last": -1}, "is negative"),
        ({"metric": "accuracy"}, "not among val_loss, loss"),
    ],
)
def test_wishes_that_mean_nothing_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        CheckpointOptions(**options)


def test_without_an_exchange_of_directories_the_old_one_makes_room(tmp_path, monkeypatch):
    directory = place(tmp_path)
    save(directory, 1)
    monkeypatch.setattr(commit, "exchange", lambda one, other: False)
    path = save(directory, 1, b"new")
    assert path.read("weights.bin") == b"new" and sorted(directory.names()) == ["latest", "step-00000001"]


def test_an_error_of_a_store_says_what_the_store_said(bucket):
    missing = place(bucket.replace("s3://", "s3://no-such-"))
    with pytest.raises(OSError) as caught:
        missing.write("x", b"1")
    assert "bucket does not exist" in str(caught.value)


def test_a_step_that_was_interrupted_between_two_renamings_has_its_name_again(tmp_path):
    directory = place(tmp_path)
    save(directory, 1)
    os.rename(tmp_path / "step-00000001", tmp_path / "step-00000001.old.tmp")
    commit.begin(directory, "step-00000001")  # what was to take its place, whole or not, is nobody's without its name
    commit.clean(directory)
    assert commit.history(directory) == ["step-00000001"] and sorted(directory.names()) == ["latest", "step-00000001"]


def test_a_latest_that_is_a_directory_is_refused_before_a_run(tmp_path):
    """As `cp -rL` makes one."""
    save(place(tmp_path / "one"), 1)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    with pytest.raises(UserError, match="copy/latest is a directory, as copies that follow links make"):
        SafetensorsCheckpoint(SafetensorsConfig()).clean(place(tmp_path / "copy"))
    SafetensorsCheckpoint(SafetensorsConfig()).clean(place(tmp_path / "one"))


def test_where_there_are_no_links_latest_is_a_file(tmp_path, monkeypatch):
    def none(self, target, target_is_directory=False):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", none)
    directory = place(tmp_path)
    for step in (1, 2):
        save(directory, step)
        assert commit.latest(directory) == f"step-{step:08d}" and (tmp_path / "latest").is_file()


def test_a_file_that_takes_some_bytes_at_a_time_is_written_whole(tmp_path):
    """As one on a disk that is filling does."""

    class Slow(io.RawIOBase):
        def __init__(self, file):
            self.file = file

        def write(self, data):
            return self.file.write(bytes(data[:3]))

        def fileno(self):
            return self.file.fileno()

        def close(self):
            self.file.close()

    class Filling(LocalPlace):
        def create(self, name):
            return Slow(super().create(name))

    Filling(tmp_path).write("x", b"more than three bytes")
    assert (tmp_path / "x").read_bytes() == b"more than three bytes"
