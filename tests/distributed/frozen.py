"""A rank that trains one configuration after another and then compares what was frozen with the files it came from, and what trained too.

torchrun --nproc-per-node N frozen.py '{"base": directory, "runs": [["override", …], …]}'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

import fw
from fw.assemble import Assembly, assemble
from fw.training import module

asked = json.loads(sys.argv[1])
before = load_file(Path(asked["base"]) / "model.safetensors")
made: list[Assembly] = []


def kept(*given: object) -> Assembly:
    made.append(assemble(*given))  # type: ignore[arg-type]  # passed on
    return made[-1]


def compare(run: Assembly) -> None:
    """While the ranks can still gather: a run's end closes what they talk through."""
    model = run.model
    assert model.adapters is not None
    values = dict(run.stepper.parameters())
    frozen = [name for name in model.base() if name not in model.adapters.tensors]
    assert len(frozen) > 10
    for name in (*frozen, *model.adapters.tensors):
        now = values.get(name, model.stored()[name]).detach()
        now = now.full_tensor() if isinstance(now, DTensor) else now
        if name in model.adapters.added:
            assert now.abs().max() > 0, f"{name} has trained"
        else:
            (of,) = model.hf_tensors(name)
            assert torch.equal(now, before[of.name]) is (name in frozen), name


module.assemble = kept  # type: ignore[attr-defined]
close = module.TrainingModule.close


def compared(self: module.TrainingModule) -> None:
    compare(self.assembly)
    close(self)


module.TrainingModule.close = compared  # type: ignore[method-assign]
for overrides in asked["runs"]:
    done = fw.train("tiny.yaml", *overrides)
    assert done.exit_code == 0, (overrides, done)
assert len(made) == len(asked["runs"])
