"""Training by kernels of fw's own, as the command line has it: asked for, not asked for, and where nothing can compile them."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import column, environment, fw
from fw.kernels.of_cpu import missing


def trained(name: str, **variables: str) -> str:
    """What it said."""
    words = ["tiny.yaml", "train.max_steps=3", "precision=bf16", f"train.run_dir={name}"]
    return fw("train", *words, env={**environment(), "FW_TRAINING_KERNELS": "on", **variables}).ok().err


@pytest.mark.skipif(missing() is not None, reason="no C++ compiler")
def test_who_cannot_compile_is_told_and_trains_by_torch(workspace: Path) -> None:
    ours = trained("ours")
    assert "CPU kernels are not compiled" not in ours
    assert "CPU kernels are not compiled" not in trained("off", FW_TRAINING_KERNELS="off")
    assert "training takes torch's operators: CXX=no-such-compiler: there is no such command" in trained("none", CXX="no-such-compiler")
    assert "training takes torch's operators: false refuses " in trained("refuses", CXX="false", FW_CACHE=str(workspace / "cache"))
    assert column("none", "loss") == column("refuses", "loss") == column("off", "loss") != column("ours", "loss")
    assert column("ours", "loss") == pytest.approx(column("off", "loss"), rel=2e-3)
