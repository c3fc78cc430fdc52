"""fw's own optimizers and schedules pass what third parties' must."""

from __future__ import annotations

import torch

from fw import testing
from fw_plugins.optimizer.adamw import AdamW
from fw_plugins.optimizer.adamw_8bit import AdamW8bit
from fw_plugins.optimizer.lion import Lion
from fw_plugins.schedule.cosine import Cosine
from fw_plugins.schedule.wsd import WarmupStableDecay


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
