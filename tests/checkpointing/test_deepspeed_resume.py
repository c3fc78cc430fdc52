"""A run goes on from DeepSpeed's files as it would from its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import TINY, column, corpus_text, environment, own_cache

pytest.importorskip("deepspeed")


def test_resume_goes_on_bit_by_bit(tmp_path):
    (tmp_path / "corpus.txt").write_text(corpus_text())
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    env = {**environment(), "FW_CACHE": own_cache(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> None:
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr[-4000:]

    python("-m", "fw", "train", "tiny.yaml", "train.run_dir=a", "train.max_steps=6", "train.save_every=3")
    python("-m", "torch.distributed.run", "--nproc-per-node", "1", str(Path(__file__).parent / "deepspeed_of_a_run.py"))
    python("-m", "fw", "checkpoint", "convert", "ds", "--like", "a/checkpoints/step-00000003", "--to", "converted")
    python("-m", "fw", "train", "tiny.yaml", "train.run_dir=b", "train.max_steps=6", "resume=converted")
    assert column(tmp_path / "b", "loss") == column(tmp_path / "a", "loss")[3:]
