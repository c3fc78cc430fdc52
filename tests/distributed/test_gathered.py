"""FSDP gathers embedding and head where they are used, not all the while between."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment
from distributed.ranks import ends

NEITHER, BOTH = [[False, False]], [[True, False]]
TIED = "model.tie_word_embeddings=true"
CASES = {
    "logits at once": ([], NEITHER, [True]),
    "in chunks": (["objective.chunk_tokens=16"], NEITHER, [True]),
    "chunks, kept in backward": (["objective.chunk_tokens=16", "sharding.reshard_after_forward=false"], NEITHER, [True]),
    "tensor": (["sharding.tensor=2"], NEITHER, [True]),
    "tensor, chunks": (["sharding.tensor=2", "objective.chunk_tokens=16"], NEITHER, [True]),
    "lora": (["peft=lora"], NEITHER, [False]),
    "one embedding for both": ([TIED], BOTH, []),
}


@pytest.mark.parametrize("case", CASES)
def test_embedding_and_head_are_whole_only_where_they_are_used(workspace: Path, case: str) -> None:
    overrides, between, reduced = CASES[case]
    ranks = 4 if "tensor" in case else 2
    program = str(Path(__file__).with_name("gathered.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), program, "tiny.yaml"]
    untied = [] if TIED in overrides else [TIED.replace("true", "false")]
    done = subprocess.run(
        [*torchrun, "sharding.name=fsdp", *untied, *overrides], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.returncode == 0, ends(done.stderr)
    for line in done.stdout.splitlines():
        assert json.loads(line) == {"forward": between, "backward": between, "reduced": reduced}
    assert len(done.stdout.splitlines()) == ranks
