"""Loading a model of 1.3 GB takes no more memory than a rank keeps, one tensor and a little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fw
from conftest import environment
from distributed.ranks import ends
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention

SLACK = 300 * 2**20


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """333 M parameters in fp32, in files of 500 MB."""
    shape = {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 4096, "vocab_size": 32000}
    model = Llama(LlamaConfig(**shape, max_position_embeddings=512), 32000, 512, SDPAttention(None))
    for parameter in model.parameters():
        parameter.data.uniform_(-0.1, 0.1)
    path = tmp_path_factory.mktemp("large") / "model"
    fw.save_model(model, path, max_shard_size="500MB")
    return path


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "float32"), (1, "bfloat16"), (2, "float32")])
def test_growth_is_what_the_rank_keeps(workspace, directory, ranks, dtype):
    largest = 32000 * 1024 * 4
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    program = Path(__file__).with_name("load_weights.py")
    done = subprocess.run(
        [sys.executable, *launch, str(program), str(directory), dtype], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, ends(done.stderr)
    whole = 333 * 10**6 * torch.finfo(getattr(torch, dtype)).bits // 8
    for rank in range(ranks):
        found = json.loads(Path(f"rank{rank}.json").read_text())
        assert found["kept"] == pytest.approx(whole / ranks, rel=0.05)
        assert 0.99 * found["kept"] < found["growth"], "the measurement must see what is kept"
        assert found["growth"] < found["kept"] + largest + SLACK, found
        print(ranks, dtype, {k: v >> 20 for k, v in found.items()})
