"""The DeepSpeed JSON of a step: what ``deepspeed.initialize`` gets, and what lands in the run directory.

Its fields are described at https://www.deepspeed.ai/docs/config-json/ .
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from fw.api import StepSpec
from fw_plugins.sharding.zero.config import AIO, OPTIMIZER_BUFFERS, PARAM_BUFFERS, ZeroConfig

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_DEEPSPEED_BUCKET = 500_000_000
_GATHERED_AHEAD = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
_OFFLOADED = {**PARAM_BUFFERS, **OPTIMIZER_BUFFERS, **AIO}


def build(config: ZeroConfig, spec: StepSpec, ranks: int, numel: int, largest: int, nvme: Path | None) -> dict[str, Any]:
    """The JSON.

    Args:
        ranks: that divide the state and see different samples.
        numel: elements of the model.
        largest: elements of its largest parameter.
        nvme: this rank's own directory on the disk; None where nothing is on one.
    """
    policy, offload = spec.precision, spec.offload
    zero: dict[str, Any] = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if field.name not in _OFFLOADED and getattr(config, field.name) is not None
    }
    # A bucket larger than all gradients together would only take its bytes.
    zero.setdefault("reduce_bucket_size", min(_DEEPSPEED_BUCKET, numel))
    pinned = spec.device_type == "cuda"
    if offload.optimizer != "device":
        zero["offload_optimizer"] = {"device": offload.optimizer, "pin_memory": pinned, **config.given(OPTIMIZER_BUFFERS)}
    if offload.params != "device":
        zero["offload_param"] = {"device": offload.params, "pin_memory": pinned, **config.given(PARAM_BUFFERS)}
    if offload.params == "nvme":
        zero["offload_param"].setdefault("buffer_size", math.ceil(largest / ranks))
        # Each parameter that is gathered holds one of the few buffers, and DeepSpeed fails where there is none left.
        for name in _GATHERED_AHEAD:
            zero.setdefault(name, 0)
    for section in (zero.get("offload_optimizer", {}), zero.get("offload_param", {})):
        if section.get("device") == "nvme":
            section["nvme_path"] = str(nvme)
    # DeepSpeed is told where each accumulation ends (stepper.py), and needs numbers here all the same. Where there are none that hold in
    # every step, more than one micro-batch makes it ready to accumulate.
    size, accumulation = spec.micro_batch_size or 1, spec.accumulation or 2
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": size * accumulation * ranks,
        "gradient_clipping": spec.clip_norm,
        "communication_data_type": _NAMES[policy.reduce],
        "data_types": {"grad_accum_dtype": _NAMES[policy.parameters]},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if policy.compute == torch.bfloat16:
        pure = policy.parameters == torch.bfloat16
        made["bf16"] = {
            "enabled": True,
            "check_grad_overflow": True,  # no update by a gradient that is not finite, as in the other dtypes
            **({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True} if pure else {}),
        }
    if policy.compute == torch.float16:
        assert policy.loss_scaling is not None
        made["fp16"] = {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": round(math.log2(policy.loss_scaling.initial_scale)),
            "loss_scale_window": policy.loss_scaling.growth_interval,
            "hysteresis": 1,
            "min_loss_scale": 1,
        }
    if "nvme" in (offload.optimizer, offload.params):
        made["aio"] = config.given(AIO)
    return made
