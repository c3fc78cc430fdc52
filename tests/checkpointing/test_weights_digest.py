"""Digests of weights: what changes them, and what is remembered of them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fw.checkpointing import weights_digest as module
from fw.checkpointing.weights_digest import weights_digest


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of three pieces and a part of one, with a cache of its own."""
    monkeypatch.setenv("FW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "_PIECE", 1 << 20)
    found = tmp_path / "model"
    found.mkdir()
    chance = torch.Generator().manual_seed(0)
    save_file({"a": torch.randn(700_000, generator=chance), "b": torch.randn(100_000, generator=chance)}, found / "model.safetensors")
    (found / "config.json").write_text(json.dumps({"rope_theta": 1e4, "transformers_version": "5"}))
    return found


def test_every_byte_counts_and_every_name(directory: Path) -> None:
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    seen = [weights_digest(directory)]
    assert weights_digest(directory) == seen[0]
    chance = torch.Generator().manual_seed(1)
    for place in {0, len(whole) - 1, *torch.randint(0, len(whole), (40,), generator=chance).tolist()}:
        changed = bytearray(whole)
        changed[place] ^= 1
        times = file.stat()
        file.write_bytes(changed)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        seen.append(weights_digest(directory))
    file.write_bytes(whole)
    assert weights_digest(directory) == seen[0] and len(set(seen)) == len(seen)
    file.rename(directory / "other.safetensors")
    assert weights_digest(directory) not in seen


def test_the_configuration_counts_but_not_who_wrote_it(directory: Path) -> None:
    before = weights_digest(directory)
    config = directory / "config.json"
    config.write_text(json.dumps({"transformers_version": "6", "rope_theta": 1e4, "_name_or_path": "here"}))
    assert weights_digest(directory) == before
    config.write_text(json.dumps({"transformers_version": "5", "rope_theta": 1e6}))
    assert weights_digest(directory) != before


def test_one_row_that_trained_is_seen(directory: Path) -> None:
    before = weights_digest(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["a"][345_678] += 1e-3
    save_file(tensors, directory / "model.safetensors")
    assert weights_digest(directory) != before


def test_a_file_is_read_once_until_it_changes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    hashed = module._of_piece
    monkeypatch.setattr(module, "_of_piece", lambda file, begin: read.append(begin) or hashed(file, begin))
    monkeypatch.setattr(module, "_SETTLED_NS", 10**18)
    file = directory / "model.safetensors"
    first = weights_digest(directory)
    assert sorted(read) == [0, 1 << 20, 2 << 20, 3 << 20]
    assert weights_digest(directory) == first and len(read) == 8, "changed too lately to be sure"
    monkeypatch.setattr(module, "_SETTLED_NS", -1)
    assert weights_digest(directory) == first and len(read) == 12
    assert weights_digest(directory) == first and len(read) == 12
    noted = next((directory.parent / "cache/digests").iterdir())
    noted.write_text("no JSON")
    assert weights_digest(directory) == first and len(read) == 16
    os.utime(file, ns=(1, 1))
    assert weights_digest(directory) == first and len(read) == 20, "times say nothing of the content"


def test_it_is_what_hashlib_says_of_the_pieces(directory: Path) -> None:
    whole = (directory / "model.safetensors").read_bytes()
    pieces = b"".join(hashlib.sha256(whole[begin : begin + (1 << 20)]).digest() for begin in range(0, len(whole), 1 << 20))
    told = hashlib.sha256(json.dumps({"rope_theta": 1e4}).encode())
    told.update(f"model.safetensors {hashlib.sha256(pieces).hexdigest()}".encode())
    assert weights_digest(directory) == told.hexdigest()
