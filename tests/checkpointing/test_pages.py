"""Reading files leaves nothing of them in the process's memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fw.checkpointing.pages import leave
from fw.checkpointing.tensor_files import TensorFiles
from fw.kinds.checkpoint import Part


def of_files() -> int:
    """Bytes of files' pages that this process has."""
    return int(re.search(r"RssFile:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="pages are counted on Linux")
def test_pages_are_left(tmp_path):
    tensors = {f"t{n}": torch.full((1 << 20,), float(n)) for n in range(16)} | {"odd": torch.arange(1001.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    target = torch.empty(1 << 20)
    before = of_files()
    for n in range(16):
        files.fill(f"t{n}", Part(target))
        assert torch.equal(target, tensors[f"t{n}"])
    assert of_files() - before < 8 << 20, "of 64 MiB that were read"
    for name in ("t3", "odd"):
        source = files.whole(name)
        leave(source)
        assert torch.equal(source, tensors[name]), "it is there still for who reads it again"
