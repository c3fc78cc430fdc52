"""A rank of somebody's program that trains again and again, each time by another budget or division, maybe in a process group of its own.

torchrun --nproc-per-node N again.py '{"own": false, "runs": [["override", …], …]}'
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

import fw

asked = json.loads(sys.argv[1])
if asked["own"]:
    dist.init_process_group("gloo")
hook = sys.excepthook
for overrides in asked["runs"]:
    assert fw.train("free.yaml", *overrides, "launch.threads=1", "launch.accelerator=cpu").exit_code == 0, overrides
    assert dist.is_initialized() == asked["own"]
    assert sys.excepthook is hook
if asked["own"]:
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [dist.get_world_size()] * 3
    dist.destroy_process_group()
