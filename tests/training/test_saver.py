"""When a save is left out."""

from __future__ import annotations

from types import SimpleNamespace

from fw.checkpointing.ranks import OneRank
from fw.config import load
from fw.recipe import World, resolve
from fw.training import saving


def test_a_save_that_another_rank_is_busy_with_is_left_out_on_all(workspace):
    """The first rank removes older checkpoints after the others are done; whoever saved then would wait for it in vain."""
    recipe = resolve(load("tiny.yaml", ["checkpoint.when_busy=skip", "checkpoint.asynchronous=true"]), World())
    saver = saving.Saver(recipe, OneRank(), SimpleNamespace(), None, lambda text: None)
    module = SimpleNamespace(strategy=SimpleNamespace(max_on_host=lambda values: [1.0]))
    assert saver._pending is None and not saver._is_free(5, module, last=False)
