"""The DeepSpeed JSON against DeepSpeed's own reading of it, and what is refused before any rank starts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from fw.errors import UserError
from fw.kinds.offload import OffloadPolicy
from fw.kinds.optimizer import OptimizerSpec
from fw.kinds.precision import LossScaling, PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.sharding.zero import Zero, disk, ds_config, engine, needed
from fw_plugins.sharding.zero.config import STAGES, ZeroConfig

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ADAMW = OptimizerSpec(torch.optim.AdamW, 1e-3, arguments={"betas": (0.9, 0.95), "eps": 1e-8})
SPEC = StepSpec(PrecisionPolicy(FP32, BF16, FP32), OffloadPolicy(), ADAMW, 1.0, 2, 4)


@pytest.fixture(scope="module")
def deepspeed():
    before = os.environ.get("DS_ACCELERATOR")
    yield engine.deepspeed("cpu")
    if before is None:
        os.environ.pop("DS_ACCELERATOR", None)


def model() -> Llama:
    with torch.device("meta"):
        return Llama(LlamaConfig(32, 2, 4, 2, intermediate_size=48), 50, 64, SDPAttention(None))


def read(deepspeed, config: ZeroConfig, spec: StepSpec = SPEC, nvme: Path | None = None):
    """What DeepSpeed makes of the JSON."""
    made = ds_config.build(config, spec, 1, 1000, 300, nvme)
    return deepspeed.runtime.config.DeepSpeedConfig(made), made


def test_deepspeed_reads_what_was_meant(deepspeed):
    config = ZeroConfig(stage=3, stage3_param_persistence_threshold=7, stage3_prefetch_bucket_size=11, sub_group_size=13)
    found, _ = read(deepspeed, config)
    zero = found.zero_config
    assert (int(zero.stage), zero.param_persistence_threshold, zero.prefetch_bucket_size, zero.sub_group_size) == (3, 7, 11, 13)
    assert (found.train_batch_size, found.gradient_accumulation_steps, found.gradient_clipping) == (8, 4, 1.0)
    assert found.bfloat16_config.enabled and found.bfloat16_config.check_grad_overflow
    assert found.communication_data_type == FP32 and found.grad_accum_dtype == "fp32"


def test_every_option_reaches_deepspeed(deepspeed, tmp_path):
    """Each option, set to what is not DeepSpeed's default, changes what DeepSpeed reads."""
    nvme = replace(SPEC, offload=OffloadPolicy("nvme", "nvme", path=tmp_path))
    for field in fields(ZeroConfig):
        if field.name == "stage":
            continue
        stage = STAGES.get(field.name, (3,))[-1]
        plain, text = read(deepspeed, ZeroConfig(stage=stage), nvme if stage == 3 else SPEC, tmp_path)
        for value in (True, False) if "bool" in str(field.type) else (3,):
            changed, other = read(deepspeed, ZeroConfig(stage=stage, **{field.name: value}), nvme if stage == 3 else SPEC, tmp_path)
            if (changed.zero_config, changed.aio_config) != (plain.zero_config, plain.aio_config):
                break
        else:
            pytest.fail(f"{field.name} changes nothing")
        assert text != other


def test_a_bucket_is_no_larger_than_the_model(deepspeed):
    assert read(deepspeed, ZeroConfig(stage=2))[0].zero_config.reduce_bucket_size == 1000
    assert read(deepspeed, ZeroConfig(stage=2, reduce_bucket_size=2000))[0].zero_config.reduce_bucket_size == 2000


def test_loss_scaling_is_handed_over(deepspeed):
    spec = replace(SPEC, precision=PrecisionPolicy(FP32, FP16, FP32, LossScaling(2.0**12, 77)))
    fp16 = read(deepspeed, ZeroConfig(), spec)[0].float16_config
    assert fp16.enabled and fp16.initial_dynamic_scale() == 2**12 and (fp16.loss_scale_window, fp16.hysteresis) == (77, 1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"stage": 4}, "sharding.stage: 4 is none of 1, 2 and 3"),
        ({"stage": 1, "stage3_prefetch_bucket_size": 5}, "means nothing in stage 1, only in stage 3"),
        ({"stage": 3, "allgather_bucket_size": 5}, "means nothing in stage 3, only in stages 1 and 2"),
        ({"stage": 1, "ignore_unused_parameters": True}, "only in stage 2"),
        ({"reduce_bucket_size": 0}, "sharding.reduce_bucket_size: 0 is too small"),
        ({"stage": 3, "stage3_max_live_parameters": -1}, "-1 is too small; the least is 0"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        ZeroConfig(**options)


HOST = OffloadPolicy("cpu")
REFUSED = [
    ({}, {"offload": OffloadPolicy(params="cpu")}, "offload.params: cpu needs sharding.stage=3"),
    ({}, {"offload": OffloadPolicy("nvme", path=Path("files"))}, "nvme in stage 3 only"),
    ({}, {"offload": OffloadPolicy(gradients="cpu")}, "set offload.optimizer=cpu as well"),
    ({"stage": 3, "zero_quantized_weights": True}, {}, "ZeRO\\+\\+ needs GPUs"),
    ({"allgather_bucket_size": 3}, {}, "3 is odd"),
    # 18,720 elements in 28 modules: the model, embedding, head and last norm, and 12 of each block
    ({"stage": 3, "stage3_module_granularity_threshold": 668}, {}, "takes the whole model for one module \\(its granularity is 668"),
    ({"aio_queue_depth": 4}, {}, "offload is not on nvme"),
    ({"stage": 3, "param_buffer_count": 4}, {"offload": HOST}, "offload.params is not on nvme"),
    ({"optimizer_fast_init": True}, {"offload": HOST}, "offload.optimizer is not on nvme"),
    ({}, {"precision": PrecisionPolicy(BF16, BF16, FP32), "offload": HOST}, "use precision=bf16"),
    ({}, {"precision": PrecisionPolicy(FP32, FP16, FP32, LossScaling(1000.0))}, "a power of 2"),
    ({}, {"precision": PrecisionPolicy(FP32, torch.float8_e4m3fn, FP32)}, "zero knows the precisions"),
]


@pytest.mark.parametrize("options, changes, message", REFUSED)
def test_what_deepspeed_cannot_do_is_refused(tmp_path, monkeypatch, options, changes, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        Zero(ZeroConfig(**options)).check(model(), {"shard": 2}, replace(SPEC, **changes), 64)


KILLED = """
import os, sys
from pathlib import Path
from fw_plugins.sharding.zero.disk import OwnDirectory
print(OwnDirectory(Path(sys.argv[1])).path, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_full_disk_is_refused_and_what_was_left_there_removed(tmp_path, monkeypatch):
    spec = replace(SPEC, offload=OffloadPolicy("nvme", "nvme", path=tmp_path), ranks_per_host=2)
    numel = sum(p.numel() for p in model().parameters())
    abandoned, own = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True), disk.OwnDirectory(tmp_path)
    assert abandoned.returncode == -9
    left = Path(abandoned.stdout.strip())
    assert left.parent == tmp_path and not left.exists() and own.path.is_dir()
    left.mkdir()
    Zero(ZeroConfig(stage=3)).check(model(), {"shard": 2}, spec, 64)
    assert own.path.is_dir() and not left.exists()
    needs = 2 * disk.bytes_per_rank(spec, numel, 2)
    assert needs >= numel * 18
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": needs - 1}))
    with pytest.raises(UserError, match="and 2 ranks on this host would write"):
        Zero(ZeroConfig(stage=3)).check(model(), {"shard": 2}, spec, 64)


def test_operators_are_built_where_they_are_used():
    assert needed(SPEC) == []
    assert needed(replace(SPEC, offload=HOST)) == ["cpu_adam"]
    sgd = OptimizerSpec(torch.optim.SGD, 1e-3)
    assert needed(replace(SPEC, offload=HOST, optimizer=sgd)) == []
    assert needed(replace(SPEC, offload=OffloadPolicy("cpu", "nvme", path=Path("files")))) == ["cpu_adam", "pin_memory", "async_io"]
