"""What an objective needs of another model, computed ahead of training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fw import config as configuration
from fw.assemble import in_files_for
from fw.bars import Bar
from fw.checkpointing.in_files import bring_ahead
from fw.errors import UserError
from fw.locate import find
from fw.pretrained import load_model
from fw.recipe import Recipe, current_world, resolve
from fw.training.batches import Batches, Plan
from fw.training.inputs import device_of, open_data, say
from fw.training.loading import loader
from fw.training.order import StepOrder


def answer_ahead(config: str | Path, *overrides: str) -> int:
    """Have the model that the config's objective asks say what training will want to know of all its rows; how many these are.

    Raises:
        UserError: the config or the data is wrong, the objective asks no model ahead, or that model has other tokens.
    """
    world = current_world()
    if world.size > 1:
        raise UserError(f"fw data teach is one process's work, and this is one of {world.size}; start it without a launcher")
    recipe = resolve(configuration.load(config, overrides), world, starts=False)
    wanted = recipe.objective.ahead
    if wanted is None:
        raise UserError(
            f"objective={recipe.names['objective'][0]} asks no model ahead of training; use objective=distill, with objective.answers"
        )
    _, batches, vocab_size = open_data(recipe, say)
    device = device_of(recipe, world)
    path = find(wanted.path)
    say(f"{wanted.option}: reading {path}")
    quantization = None if wanted.quantization == "none" else wanted.quantization
    policy = in_files_for(device.type) if wanted.in_files else None
    model = load_model(path, recipe.precision.policy().compute, device, recipe.attention, quantization=quantization, offload=policy)
    bring_ahead(model)
    if model.vocab_size != vocab_size:
        raise UserError(f"{wanted.option}: {wanted.path} has {model.vocab_size} tokens, this run {vocab_size}; they must be the same")
    rows = seen(recipe, batches)
    with Bar(total=len(rows), desc="asking", unit=" rows") as bar:

        def each() -> Iterator[dict[str, Tensor]]:
            for batch in loader(batches.train, _plans(rows, recipe.micro_batch_size), recipe.loader, device):
                for micro in batch.micro_batches:
                    yield {key: tensor.to(device) for key, tensor in micro.items()}
                    bar.update(len(micro["input_ids"]))

        recipe.objective.answer(model, each())
    return len(rows)


def seen(recipe: Recipe, batches: Batches) -> NDArray[np.int64]:
    """Rows of the data that ``train.max_steps`` steps see, each once."""
    train, rows = recipe.train, len(batches.train.samples)
    if train.max_steps * train.global_batch_size >= rows:
        return np.arange(rows)
    order = iter(StepOrder(rows, train.global_batch_size, train.seed, 0, batches.train.lengths, train.length_bucketing))
    return np.unique(np.concatenate([next(order) for _ in range(train.max_steps)]))


def _plans(rows: NDArray[np.int64], together: int) -> list[Plan]:
    return [Plan([group.tolist()], np.zeros(0, np.int64)) for group in np.split(rows, range(together, len(rows), together))]
