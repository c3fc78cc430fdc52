"""Which step of an epoch a plan takes for the largest, and which micro-batch of a validation."""

from __future__ import annotations

from pathlib import Path

from fw import config as configuration
from fw.planning.plan import largest_step, largest_validation, plan
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


LONG_ROWS = [
    "data={name: text, files: ['long/*.txt'], samples: documents, tokenizer: byte, val_fraction: 0.9}",
    "train.sequence_length=512",
    "peft=lora",
]


def test_a_validation_of_longer_rows_takes_more_than_a_step(workspace: Path) -> None:
    """Then it is what a budget is compared with."""
    Path("long").mkdir()
    overrides = [*LONG_ROWS, "train.val_every=1", "train.micro_batch_size=2"]
    for attempt in range(20):  # until the long document is held out: which is, follows from its hash
        texts = [*(f"{attempt} {number} short" for number in range(160)), f"{attempt} " + "long " * 90]
        for number, text in enumerate(texts):
            Path(f"long/{number}.txt").write_text(text)
        recipe = resolve(configuration.load("tiny.yaml", overrides), current_world(), starts=False)
        _, batches, _ = open_data(recipe, say_nothing)
        if batches.val.lengths.max() > 400:
            break
    largest = largest_validation(batches)
    assert largest is not None and largest["labels"].shape[1] == batches.val.padded(slice(None)).max() > 400
    rank = plan("tiny.yaml", *overrides).largest
    assert rank.taken == rank.phases["validate"].allocated_peak > rank.allocated_peak
    assert rank.peak_phase in ("forward", "backward", "step"), "what is said of steps is of steps"
    without = plan("tiny.yaml", *overrides, "train.val_every=0").largest
    assert "validate" not in without.phases and without.taken == rank.allocated_peak


def test_weights_that_a_validation_sees_twice(workspace: Path) -> None:
    """In fp32 and converted, beside the optimizer's state."""
    wide = ["precision={name: bf16, full_eval: true}", "train.val_every=1", "train.micro_batch_size=1", "model.hidden_size=256"]
    twice, once = (plan("tiny.yaml", *wide, f"precision.full_eval={wanted}").largest.phases["validate"] for wanted in ("true", "false"))
    weights = twice.parts["parameters"]
    assert weights == once.parts["parameters"]
    assert once.parts["activations"] < weights // 2 <= twice.parts["activations"], "all copies are there at once, else a layer's"
