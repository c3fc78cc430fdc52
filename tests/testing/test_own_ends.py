"""fw's own models, data, losses, and what comes of a run pass what third parties' must."""

from __future__ import annotations

import csv
from pathlib import Path

from fw import testing
from fw_plugins.checkpoint.safetensors import SafetensorsCheckpoint
from fw_plugins.data.synthetic import SyntheticData
from fw_plugins.launcher.kubernetes import KubernetesLauncher
from fw_plugins.launcher.local import LocalLauncher
from fw_plugins.logger.csv import CsvMetrics
from fw_plugins.model.llama import LlamaModel
from fw_plugins.objective.causal_lm import CausalLMObjective


class TestCausalLM(testing.ObjectiveSuite):
    plugin = CausalLMObjective
    bad_options = ({"z_loss": -1.0}, {"label_smoothing": 1.0})


class TestCsv(testing.LoggerSuite):
    plugin = CsvMetrics

    def rows(self, run_dir: Path):
        with (run_dir / "metrics.csv").open(newline="") as file:
            return [{"loss": float(row["loss"])} for row in csv.DictReader(file)]


class TestSynthetic(testing.DataSuite):
    plugin = SyntheticData
    options = {"vocab_size": 128, "samples": 96}


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
