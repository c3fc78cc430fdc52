"""fw's own plugins pass what third parties' must."""

from __future__ import annotations

import csv
import importlib.metadata
from pathlib import Path

import pytest
import torch

from fw import registry, testing
from fw.kinds import KINDS, plugin_class
from fw_plugins.activation.blocks import Full
from fw_plugins.attention.chunked import ChunkedAttention
from fw_plugins.attention.eager import EagerAttention
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.checkpoint.safetensors import SafetensorsCheckpoint
from fw_plugins.data.synthetic import SyntheticData
from fw_plugins.kv_cache.contiguous import Contiguous
from fw_plugins.kv_cache.paged import Paged
from fw_plugins.launcher.kubernetes import KubernetesLauncher
from fw_plugins.launcher.local import LocalLauncher
from fw_plugins.logger.csv import CsvMetrics
from fw_plugins.model.llama import LlamaModel
from fw_plugins.objective.causal_lm import CausalLMObjective
from fw_plugins.offload.tiers import Tiers
from fw_plugins.optimizer.adamw import AdamW
from fw_plugins.optimizer.adamw_8bit import AdamW8bit
from fw_plugins.optimizer.lion import Lion
from fw_plugins.peft.lora import Lora
from fw_plugins.precision.bf16 import BF16
from fw_plugins.quantization.weight_only import W8A16
from fw_plugins.schedule.cosine import Cosine
from fw_plugins.schedule.wsd import WarmupStableDecay
from fw_plugins.sharding.ddp import DDP
from fw_plugins.sharding.fsdp import FSDP


class TestAdamW(testing.OptimizerSuite):
    plugin = AdamW
    bad_options = ({"betas": [0.9]}, {"lr": -1.0})

    def reference(self, weights):
        return torch.optim.AdamW(weights, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)


class TestAdamW8bit(testing.OptimizerSuite):
    plugin = AdamW8bit


class TestLion(testing.OptimizerSuite):
    plugin = Lion


class TestCosine(testing.ScheduleSuite):
    plugin = Cosine
    options = {"warmup_steps": 4, "final": 0.0}
    bad_options = ({"warmup_steps": -1}, {"final": 2.0})
    expected = [0.25, 0.5, 0.75, 1.0]


class TestWarmupStableDecay(testing.ScheduleSuite):
    plugin = WarmupStableDecay


class TestSDPA(testing.AttentionSuite):
    plugin = SDPAttention


class TestEager(testing.AttentionSuite):
    plugin = EagerAttention


class TestChunked(testing.AttentionSuite):
    plugin = ChunkedAttention


class TestPaged(testing.KVCacheSuite):
    plugin = Paged
    options = {"block_size": 4}
    bad_options = ({"block_size": 0},)


class TestContiguous(testing.KVCacheSuite):
    plugin = Contiguous


class TestFull(testing.ActivationSuite):
    plugin = Full


class TestTiers(testing.OffloadSuite):
    plugin = Tiers
    options = {"optimizer": "cpu"}


class TestDDP(testing.ShardingSuite):
    plugin = DDP


class TestFSDP(testing.ShardingSuite):
    plugin = FSDP


class TestBF16(testing.PrecisionSuite):
    plugin = BF16


class TestCausalLM(testing.ObjectiveSuite):
    plugin = CausalLMObjective
    bad_options = ({"z_loss": -1.0}, {"label_smoothing": 1.0})


class TestLora(testing.PeftSuite):
    plugin = Lora
    options = {"rank": 4}


class TestCsv(testing.LoggerSuite):
    plugin = CsvMetrics

    def rows(self, run_dir: Path):
        with (run_dir / "metrics.csv").open(newline="") as file:
            return [{"loss": float(row["loss"])} for row in csv.DictReader(file)]


class TestSynthetic(testing.DataSuite):
    plugin = SyntheticData
    options = {"vocab_size": 128, "samples": 96}


class TestW8A16(testing.QuantizationSuite):
    plugin = W8A16
    options = {"group_size": 8}


class TestLlama(testing.ModelSuite):
    plugin = LlamaModel
    options = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }


class TestSafetensors(testing.CheckpointSuite):
    plugin = SafetensorsCheckpoint


class TestLocal(testing.LauncherSuite):
    plugin = LocalLauncher


class TestKubernetes(testing.LauncherSuite):
    plugin = KubernetesLauncher
    starts = False


OWN = [
    pytest.param(point.group.removeprefix("fw."), point.name, id=f"{point.group.removeprefix('fw.')} {point.name}")
    for point in importlib.metadata.distribution("fw").entry_points
    if point.group.startswith("fw.")
]


@pytest.mark.parametrize("kind, name", OWN)
def test_all_fill_their_contract_by_what_is_public(kind: str, name: str) -> None:
    (entry,) = registry.entries(kind, name)
    if not (listed := registry.inspect(entry, KINDS[kind].apis)).available:
        pytest.skip(listed.problem)
    cls = plugin_class(KINDS[kind].load_contract(), name)
    suite = type("Suite", (testing.PluginSuite,), {"plugin": cls})()
    suite.test_every_option_has_a_type_and_a_sentence()
    suite.test_it_uses_of_fw_what_is_public()
    suite.test_no_option_is_called_as_the_plugin_is()
    if not cls.__module__.startswith(("fw_plugins.logger", "fw_plugins.sharding.zero")):  # whose packages need not be here
        suite.test_it_pickles_nothing()
    assert suite.entry.name
