"""Which GPUs each engine of several may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from fw.server import starting
from fw.server.settings import settings
from serving import serving


@pytest.mark.parametrize(
    ("said", "each"),
    [
        (None, ["0,1", "2,3"]),
        ("", [None, None]),
        ("5", ["5", "5"]),
        ("4,6", ["4", "6"]),
    ],
)
def test_gpus_are_shared_as_far_as_they_are_to_be_used(directory, monkeypatch, said, each):
    begun = []
    monkeypatch.setattr(starting, "start_process", lambda begin, environment: begun.append(environment))
    monkeypatch.setattr(starting.os, "listdir", lambda place: ["a", "b", "c", "d"])
    if said is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
    starting.Starting(settings(str(directory), ["serve.replicas=2"]))
    assert [environment and environment["CUDA_VISIBLE_DEVICES"] for environment in begun] == each


def test_the_server_itself_has_no_torch(directory):
    """In a process that begins as users' do."""
    with serving(directory, environment={"PYTHONHASHSEED": "1"}) as server:
        maps = Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "libtorch" not in maps and "libtorch" in Path(f"/proc/{server.engine()}/maps").read_text()
