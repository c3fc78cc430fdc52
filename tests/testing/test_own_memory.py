"""fw's own ways to take less memory, and to divide a model pass what third parties' must."""

from __future__ import annotations

from fw import testing
from fw_plugins.activation.blocks import Full
from fw_plugins.offload.tiers import Tiers
from fw_plugins.peft.lora import Lora
from fw_plugins.precision.bf16 import BF16
from fw_plugins.quantization.weight_only import W8A16
from fw_plugins.sharding.ddp import DDP
from fw_plugins.sharding.fsdp import FSDP


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


class TestLora(testing.PeftSuite):
    plugin = Lora
    options = {"rank": 4}


class TestW8A16(testing.QuantizationSuite):
    plugin = W8A16
    options = {"group_size": 8}
