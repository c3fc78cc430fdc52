"""`train.deterministic`: the same bits twice, or the operator that stands against it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

import fw as package
from conftest import column, fw
from fw.errors import RunError
from fw.training.determinism import deterministic, prevented

CPU = torch.device("cpu")
WORDS = ["train.deterministic=true", "train.max_steps=4", "train.save_every=4", "precision=bf16"]
ANY_ORDER = """
import torch
from fw_plugins.objective.causal_lm import CausalLMObjective
from fw.api import register


@register("any_order")
class AnyOrder(CausalLMObjective):
    def loss_sum(self, model, batch):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))  # which of them is there, nobody knows
        return super().loss_sum(model, batch)
"""


ASKED = """
from pathlib import Path

import torch
from fw_plugins.objective.causal_lm import CausalLMObjective
from fw.api import register


@register("asked")
class Asked(CausalLMObjective):
    def loss_sum(self, model, batch):
        Path("asked.txt").write_text(str(torch.are_deterministic_algorithms_enabled()))
        return super().loss_sum(model, batch)
"""


def _digests(run: str) -> dict[str, str]:
    files = Path(run, "checkpoints/latest").resolve().glob("*.safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("more", [[], ["sharding=fsdp", "launch.devices=2", "activation=full"]], ids=["one", "two"])
def test_two_runs_give_the_same_bits(workspace: Path, more: list[str]) -> None:
    Path("asked.py").write_text(ASKED)
    for run in ("one", "two"):
        fw("train", "tiny.yaml", *WORDS, *more, "plugins=[asked.py]", "objective=asked", f"train.run_dir={run}").ok()
    assert Path("asked.txt").read_text() == "True"
    assert column("one", "loss") == column("two", "loss") and column("one", "grad_norm") == column("two", "grad_norm")
    assert _digests("one") == _digests("two") != {}


@pytest.mark.parametrize("more", [[], ["sharding=ddp", "launch.devices=2"]], ids=["one", "two"])
def test_what_prevents_it_is_named(workspace: Path, more: list[str]) -> None:
    Path("any_order.py").write_text(ANY_ORDER)
    words = ["plugins=[any_order.py]", "objective=any_order", "train.max_steps=1"]
    fw("train", "tiny.yaml", *words, *more).ok()
    failed = fw("train", "tiny.yaml", *words, *more, "train.deterministic=true", "train.run_dir=other")
    assert failed.code == 1 and "Traceback" not in failed.err
    assert "train.deterministic: put_ has no implementation on cpu that gives the same bits each time" in failed.err


def test_a_plugin_that_says_so_itself_is_refused(workspace: Path) -> None:
    mine = ANY_ORDER.replace("    def loss_sum", '    differs_because = "it throws dice; use objective=causal_lm"\n\n    def loss_sum')
    Path("any_order.py").write_text(mine)
    refused = fw("train", "tiny.yaml", "plugins=[any_order.py]", "objective=any_order", *WORDS)
    assert refused.code == 2
    assert "train.deterministic: objective 'any_order' may differ from run to run, because it throws dice" in refused.err


def test_nothing_stays_behind(workspace: Path) -> None:
    """Not even where a run fails."""
    before = (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
    package.train("tiny.yaml", *WORDS)
    with pytest.raises(ZeroDivisionError), deterministic(True, CPU):
        assert torch.are_deterministic_algorithms_enabled()
        raise ZeroDivisionError
    assert (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory) == before


def test_torchs_own_sentences_are_known() -> None:
    """Of a CPU as it says it, of a GPU as it is in its sources."""
    blas = RuntimeError(
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or `at::Context::setDeterministic"
        "Algorithms(true)`, but this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable"
        " deterministic behavior in this case, you must set an environment variable before running your PyTorch application:"
        " CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
    )
    with deterministic(True, CPU):
        with pytest.raises(RuntimeError) as found:
            torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))
        assert isinstance(told := prevented(found.value, CPU), RunError) and "put_ has no implementation" in str(told)
        assert "lets cuBLAS add up in any order" in str(prevented(blas, CPU))
        assert prevented(RuntimeError("something else"), CPU) is None
    assert prevented(found.value, CPU) is None, "nobody asked"
