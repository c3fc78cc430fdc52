"""Which ranks are alike, against what each rank keeps when it divides the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.tensor import DTensor

from fw import config
from fw.assemble import build
from fw.kinds.data import Rows
from fw.planning.alike import ranks_alike
from fw.planning.trace import TRACED, as_rank
from fw.recipe import Recipe, resolve

CASES = {
    "even": ["sharding=fsdp", "launch.devices=2"],
    "uneven": ["sharding=fsdp", "launch.devices=3", "train.global_batch_size=18"],
    "more ranks than rows": ["sharding=fsdp", "launch.devices=48", "train.global_batch_size=96"],
    "copies": ["sharding={name: fsdp, replicate: 2}", "launch.devices=6", "train.global_batch_size=12"],
    "layers divided too": ["sharding={name: fsdp, tensor: 2}", "launch.devices=6", "train.global_batch_size=12"],
    "every rank keeps all": ["sharding=ddp", "launch.devices=3", "train.global_batch_size=18"],
}


def kept(recipe: Recipe, rank: int) -> list[tuple[int, ...]]:
    with as_rank(recipe, rank) as mesh:
        model = build(recipe, 258, mesh, TRACED, Rows()).model
        return [tuple((p.to_local() if isinstance(p, DTensor) else p).shape) for p in model.parameters()]


@pytest.mark.parametrize("case", CASES)
def test_the_first_of_its_kind_stands_for_each_rank(workspace: Path, case: str) -> None:
    recipe = resolve(config.load("tiny.yaml", CASES[case]), starts=False)
    parts = [kept(recipe, rank) for rank in range(recipe.world_size)]
    assert ranks_alike(recipe, 258, Rows()) == [parts.index(part) for part in parts]
