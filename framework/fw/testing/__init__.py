"""Tests that a plugin must pass, by kind: derive from the kind's suite, name the plugin, run pytest (which it needs)."""

from fw.testing.attention import AttentionSuite
from fw.testing.building import from_file
from fw.testing.checkpoint import CheckpointSuite
from fw.testing.kv_cache import KVCacheSuite
from fw.testing.launcher import LauncherSuite
from fw.testing.model_to_metrics import DataSuite, LoggerSuite, ModelSuite, ObjectiveSuite
from fw.testing.optimizer import OptimizerSuite
from fw.testing.probe import Probe
from fw.testing.running import Run, Runs
from fw.testing.saving_memory import ActivationSuite, OffloadSuite, PeftSuite, PrecisionSuite, QuantizationSuite, ShardingSuite
from fw.testing.schedule import ScheduleSuite
from fw.testing.suite import PluginSuite
from fw.testing.trained import TrainedSuite

SUITES: dict[str, type[PluginSuite]] = {
    "activation": ActivationSuite,
    "attention": AttentionSuite,
    "checkpoint": CheckpointSuite,
    "data": DataSuite,
    "kv_cache": KVCacheSuite,
    "launcher": LauncherSuite,
    "logger": LoggerSuite,
    "model": ModelSuite,
    "objective": ObjectiveSuite,
    "offload": OffloadSuite,
    "optimizer": OptimizerSuite,
    "peft": PeftSuite,
    "precision": PrecisionSuite,
    "quantization": QuantizationSuite,
    "schedule": ScheduleSuite,
    "sharding": ShardingSuite,
}
"""By kind."""

__all__ = [
    "SUITES",
    "ActivationSuite",
    "AttentionSuite",
    "CheckpointSuite",
    "DataSuite",
    "KVCacheSuite",
    "LauncherSuite",
    "LoggerSuite",
    "ModelSuite",
    "ObjectiveSuite",
    "OffloadSuite",
    "OptimizerSuite",
    "PeftSuite",
    "PluginSuite",
    "PrecisionSuite",
    "Probe",
    "QuantizationSuite",
    "Run",
    "Runs",
    "ScheduleSuite",
    "ShardingSuite",
    "TrainedSuite",
    "from_file",
]
