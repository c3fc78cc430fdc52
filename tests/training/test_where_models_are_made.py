"""Where what a model is made of lands. Lightning makes a GPU the default device while it configures a model; fw does not."""

from __future__ import annotations

import torch

from fw.checkpointing.placement import initialise
from fw.kinds.model import Init
from fw.recipe import World
from fw.training.strategy import MeshStrategy


def test_the_strategy_sets_no_default_device():
    strategy = MeshStrategy(World(), {}, torch.device("meta"), 60, 60)
    with strategy.tensor_init_context():
        assert torch.empty(1).device.type == "cpu"


def test_initial_values_do_not_depend_on_the_default_device():
    for init in (Init(std=0.5), Init(bound=0.5)):
        expected, found = torch.empty(3, 5), torch.empty(3, 5)
        initialise(expected, "weight", init, 0)
        with torch.device("meta"):
            initialise(found, "weight", init, 0)
        assert found.equal(expected) and found.std() > 0.1
