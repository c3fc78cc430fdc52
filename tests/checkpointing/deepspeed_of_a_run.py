"""A run's third step put into an engine of DeepSpeed's, weights and optimizer state, which saves it; for test_deepspeed_resume."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from safetensors.torch import load_file

from fw.pretrained import load_model

step = "a/checkpoints/step-00000003"
deepspeed.init_distributed("gloo")
model = load_model(step).train()
states = load_file(f"{step}/optimizer.safetensors")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(3):  # steps that change nothing, so that there is state to replace
    engine.backward(engine(torch.zeros(1, 8, dtype=torch.int64)).float().square().mean())
    engine.step()
flat = engine.optimizer.single_partition_of_fp32_groups[0]
order = [engine.param_names[p] for p in engine.optimizer.round_robin_bit16_groups[0]]
for key in ("exp_avg", "exp_avg_sq"):
    values = torch.cat([states[f"{name}/{key}"].reshape(-1) for name in order])
    optimizer.state[flat][key].zero_()[: values.numel()] = values
engine.save_checkpoint("ds")
torch.distributed.destroy_process_group()
