"""Gradients of bf16 averaged in fp32 by ddp's hook, and which copies are there when the next is made.

torchrun --nproc-per-node N averages.py {false,true}        whether the graph is static
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fw_plugins.sharding.ddp as ddp

static = json.loads(sys.argv[1])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).bfloat16()
alone = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8))).bfloat16()
alone.load_state_dict(model.state_dict())
wrapped = DistributedDataParallel(model, bucket_cap_mb=1 / 4, gradient_as_bucket_view=True, static_graph=static)
averages = ddp.Averages(torch.float32, on_host=True, one_call=static)
wrapped.register_comm_hook(averages, lambda state, bucket: state.reduce(bucket))

copies: list[torch.UntypedStorage] = []
all_reduce = dist.all_reduce


def noted(tensor: torch.Tensor, **how: bool) -> dist.Work | None:
    assert not any(copy.nbytes() for copy in copies), "a copy is made when that of the bucket before is gone"
    assert tensor.dtype == torch.float32
    copies.append(tensor.untyped_storage())
    return all_reduce(tensor, **how)


ddp.dist.all_reduce = noted  # type: ignore[attr-defined]
for step in range(3):
    generator = torch.Generator().manual_seed(10 * step + rank)
    x_BD = torch.randn(4, 256, generator=generator).bfloat16()
    for each in (wrapped, alone):
        each.zero_grad()
        each(x_BD).float().pow(2).sum().backward()
    assert len(copies) > (3 if step == 2 else 0), "torch divides gradients anew after the first steps"
    assert not any(copy.nbytes() for copy in copies)
    copies.clear()
    for averaged, own in zip(model.parameters(), alone.parameters(), strict=True):
        assert averaged.grad is not None and own.grad is not None
        mean = own.grad.float() / size
        all_reduce(mean)
        torch.testing.assert_close(averaged.grad, mean.bfloat16(), rtol=0, atol=0)
dist.destroy_process_group()
