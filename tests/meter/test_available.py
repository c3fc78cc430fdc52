"""How much memory can be had within a container's limit, by files as the kernel writes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fw.meter import memory
from fw.meter.memory import available_bytes

HERE = torch.device("cpu")
V2, V1 = memory._GROUPS


def group(place: Path, of: memory.ControlGroup, limit: str, used: int, stat: str | None) -> memory.ControlGroup:
    (place / of.limit).write_text(f"{limit}\n")
    (place / of.used).write_text(f"{used}\n")
    if stat is not None:
        (place / "memory.stat").write_text(stat)
    return memory.ControlGroup(place, of.limit, of.used, of.kept)


@pytest.mark.parametrize(
    "of, stat, kept",
    [
        (V2, "anon 700\nfile 250\nshmem 50\ninactive_file 150\nactive_file 40\nslab_reclaimable 10\nslab_unreclaimable 5\n", 200),
        (V1, "cache 300\ninactive_file 1\nactive_file 2\ntotal_inactive_file 150\ntotal_active_file 40\n", 190),
        (V2, None, 0),
        (V2, "inactive_file many\n", 0),
    ],
)
def test_files_that_were_read_can_be_given_back(tmp_path, monkeypatch, of, stat, kept):
    monkeypatch.setattr(memory, "_GROUPS", (group(tmp_path, of, "1000", 900, stat),))
    assert available_bytes(HERE) == 100 + kept


def test_without_a_limit_it_is_the_machine_s(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_GROUPS", ())
    whole = available_bytes(HERE)
    (tmp_path / "a").mkdir()
    found = group(tmp_path / "a", V2, "max", 900, None), memory.ControlGroup(tmp_path / "none", V2.limit, V2.used, V2.kept)
    monkeypatch.setattr(memory, "_GROUPS", found)
    assert [each.left() for each in found] == [None, None]
    assert available_bytes(HERE) == pytest.approx(whole, rel=0.2) and whole > 1 << 20


def test_nothing_is_left_where_more_is_used_than_there_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_GROUPS", (group(tmp_path, V2, "1000", 1200, None),))
    assert available_bytes(HERE) == 0


def test_a_containers_memory_is_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_GROUPS", ())
    whole = memory.host_memory()
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, most in (("1000", 1000), (str(whole + 1), whole), ("max", whole)):
        monkeypatch.setattr(memory, "_GROUPS", (group(tmp_path, V2, limit, 900, None),))
        assert memory.host_memory() == most
