"""What DeepSpeed cannot do, said before any rank starts."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import nn

from fw.api import CausalLM, StepSpec, UserError
from fw_plugins.sharding.zero import disk
from fw_plugins.sharding.zero.config import AIO, OPTIMIZER_BUFFERS, PARAM_BUFFERS, ZERO_PLUS_PLUS, ZeroConfig

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def check(config: ZeroConfig, spec: StepSpec, model: CausalLM, ranks: int) -> None:
    """Refuse the first thing that would not work.

    Raises:
        UserError: what it is, why, and what works.
    """
    _precision(spec)
    _offload(config, spec)
    if spec.optimizer.in_backward:
        raise UserError("optimizer.in_backward: DeepSpeed updates after backward, by the norm of all gradients; use sharding=fsdp")
    if spec.averages:
        raise UserError(
            "train.ema_decay: zero keeps what it trains in flat tensors of DeepSpeed's, and no part of a parameter by itself; use"
            " sharding=fsdp"
        )
    if spec.optimizer.state != "elements":
        raise UserError(
            "zero joins parameters into one flat tensor and cuts it between ranks, and this optimizer needs their rows; use sharding=fsdp,"
            " or an optimizer whose update is by elements (adamw, adamw_bf16, lion, sgd)"
        )
    _options(config, spec)
    if spec.offload.params == "nvme" and any(not p.requires_grad for p in model.parameters()):
        raise UserError("offload.params: DeepSpeed brings to the disk what it trains, and this model is frozen in part; use cpu")
    if config.stage == 3 and model.quantized:
        raise UserError(
            "sharding.stage: 3 does not divide codes of weights (DeepSpeed gathers one dtype); use stage 2 or 1, or sharding=fsdp"
        )
    if config.stage == 3 and model.adapters is not None and any(".peft." in name for name in model.adapters.added):
        raise UserError(
            "sharding.stage: 3 brings parameters to the layers that DeepSpeed sees, and hf_peft computes with layers inside of others; use"
            " stage 2 or 1, or sharding=fsdp"
        )
    if config.stage == 3 and model.adapters is not None and model.adapters.from_base:
        raise UserError("sharding.stage: 3 has no whole rows of a weight when dora takes their norms; use stage 2 or 1, or sharding=fsdp")
    if config.zero_hpz_partition_size is not None and ranks % config.zero_hpz_partition_size:
        raise UserError(f"sharding.zero_hpz_partition_size: {config.zero_hpz_partition_size} does not divide {ranks} ranks")
    if (config.allgather_bucket_size or 0) % 2:
        raise UserError(
            f"sharding.allgather_bucket_size: {config.allgather_bucket_size} is odd, and DeepSpeed gathers from even places only"
        )
    if (whole := _granularity(model)) <= (config.stage3_module_granularity_threshold or 0):
        raise UserError(
            f"sharding.stage3_module_granularity_threshold: {config.stage3_module_granularity_threshold} takes the whole model for one"
            f" module (its granularity is {whole}), which DeepSpeed cannot train; give less"
        )
    if spec.offload.params == "nvme" and config.param_buffer_size is not None:
        least = math.ceil(max(p.numel() for p in model.parameters()) / ranks)
        if config.param_buffer_size < least:
            raise UserError(f"sharding.param_buffer_size: {config.param_buffer_size} is less than a rank's largest part, {least} elements")
    if spec.offload.path is not None and spec.is_here:
        disk.check_space(spec, sum(p.numel() for p in model.parameters()), ranks)


def _precision(spec: StepSpec) -> None:
    policy = spec.precision
    if policy.accumulates_apart:
        raise UserError("precision.accumulate: zero sums gradients up in the parameters' dtype; leave it out, or use sharding=fsdp")
    if len(spec.computes_in) > 1:
        raise UserError("precision.phases: DeepSpeed's engine keeps its weights for forward in one dtype; use sharding=fsdp, ddp or single")
    if (policy.parameters, policy.compute) not in ((FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16)):
        raise UserError("zero knows the precisions fp32, bf16, bf16_true, fp16 and fp8 only; use one of these, or sharding=fsdp")
    if policy.parameters == BF16 and spec.offload.optimizer != "device":
        raise UserError("zero keeps fp32 weights for an optimizer that is offloaded; use precision=bf16, or offload.optimizer=device")
    scaling = policy.loss_scaling
    if scaling is not None and (scaling.initial_scale < 1 or not math.log2(scaling.initial_scale).is_integer()):
        raise UserError(f"precision.initial_scale: zero begins with a power of 2 from 1 on, and {scaling.initial_scale} is none")
    if policy.compute == FP16 and spec.device_type == "cpu" and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise UserError("zero computes in float16 only on processors that do so themselves, and this one does not; use precision=bf16")


def _offload(config: ZeroConfig, spec: StepSpec) -> None:
    offload = spec.offload
    if offload.params_in_files:
        raise UserError(
            "offload.params: nvme without a path leaves weights in the model's files, where DeepSpeed does not look; use sharding=single or"
            " ddp, or set offload.path"
        )
    if offload.budget is not None or offload.modules:
        name = "budget" if offload.budget is not None else "modules"
        raise UserError(f"offload.{name}: DeepSpeed brings all parameters; leave it out, or use sharding=single or ddp")
    if offload.params != "device" and config.stage < 3:
        raise UserError(
            f"offload.params: {offload.params} needs sharding.stage=3; in stage {config.stage} every rank computes with all parameters"
        )
    if offload.optimizer == "nvme" and config.stage < 3:
        raise UserError(f"offload.optimizer: DeepSpeed puts it on nvme in stage 3 only, not in {config.stage}; use cpu, or stage 3")
    if offload.gradients != "device" and offload.optimizer == "device":
        raise UserError("offload.gradients: DeepSpeed keeps gradients where the optimizer is; set offload.optimizer=cpu as well")


def _options(config: ZeroConfig, spec: StepSpec) -> None:
    if spec.device_type != "cuda":
        for name in ZERO_PLUS_PLUS:
            value = getattr(config, name)
            if value is True or (value is not None and value > 1):
                raise UserError(f"sharding.{name}: ZeRO++ needs GPUs; leave it out")
    on_disk = {"optimizer": spec.offload.optimizer == "nvme", "params": spec.offload.params == "nvme"}
    used = {
        **dict.fromkeys(PARAM_BUFFERS, on_disk["params"]),
        **dict.fromkeys(OPTIMIZER_BUFFERS, on_disk["optimizer"]),
        **dict.fromkeys(AIO, any(on_disk.values())),
    }
    for field in fields(config):
        if getattr(config, field.name) is not None and not used.get(field.name, True):
            which = {**dict.fromkeys(PARAM_BUFFERS, ".params"), **dict.fromkeys(OPTIMIZER_BUFFERS, ".optimizer")}.get(field.name, "")
            raise UserError(f"sharding.{field.name}: offload{which} is not on nvme, so there is nothing it could do; leave it out")


def _granularity(model: CausalLM) -> float:
    """Of the whole model, as DeepSpeed counts it: elements by modules that have any; infinite above a billion, which it leaves divided."""
    numel = sum(p.numel() for p in model.parameters())
    modules = [m for m in model.modules() if type(m).__name__ not in nn.modules.container.__all__ and any(True for _ in m.parameters())]
    return numel // len(modules) if numel <= 1e9 else math.inf
