"""Which step of an epoch a plan takes for the largest."""

from __future__ import annotations

from pathlib import Path

from fw import config as configuration
from fw.planning.plan import largest_step
from fw.recipe import current_world, resolve
from fw.training.inputs import open_data, say_nothing

FEW = [
    "data={name: synthetic, vocab_size: 300, samples: 9, min_length: 8}",
    "train.global_batch_size=8",
    "train.micro_batch_size=2",
    "train.sequence_length=512",
]


def test_the_longest_row_may_be_in_the_step_that_an_epoch_ends_in(workspace: Path) -> None:
    for seed in range(20):
        recipe = resolve(configuration.load("tiny.yaml", [*FEW, f"train.seed={seed}"]), current_world(), starts=False)
        _, batches, _ = open_data(recipe, say_nothing)
        longest = max(int(batches.train.padded(slice(row, row + 1))[0]) for row in range(9))
        assert max(part["labels"].shape[1] for part in largest_step(batches)) == longest, seed
