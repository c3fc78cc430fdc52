"""What a run begins with: device, data, the checkpoint it goes on from; and what is wrong with them, found before any rank starts."""

from __future__ import annotations

import os
import socket
import sys
from itertools import islice

import torch

from fw.assemble import check, check_beginning, undivided
from fw.checkpointing.quantized_files import quantization_for, weights_of
from fw.checkpointing.ranks import OneRank
from fw.checkpointing.tensor_files import weights_for
from fw.errors import UserError
from fw.kernels.of_cpu import missing, multiplies
from fw.kinds.checkpoint import Ranks, Reader
from fw.kinds.data import CUT_OFF, Corpus, Say
from fw.recipe import Recipe, World
from fw.training import resume
from fw.training.batches import Batches, arrange
from fw.training.same_tokenizer import foreign


def check_input(recipe: Recipe, device: torch.device | None = None) -> Reader | None:
    """Prepare the data and find what is wrong with the input; returns the checkpoint the run begins from, if any.

    Args:
        device: of a rank; None where ranks will run on machines with the devices the config asks for.

    Raises:
        UserError: the input is wrong.
    """
    corpus, batches, vocab_size = open_data(recipe, say)
    runs_on = device or torch.device("cpu" if recipe.launch.accelerator == "cpu" else "cuda")
    check(recipe, vocab_size, runs_on, batches.rows, is_here=device is not None)
    note(recipe, runs_on)
    checkpoint = resume.find(recipe, corpus, OneRank(), say)
    if device is not None:  # where ranks run, weights may be that are not here
        check_files(recipe, vocab_size, checkpoint, OneRank())
        note_codes(recipe, vocab_size)
    return checkpoint


def note_codes(recipe: Recipe, vocab_size: int) -> None:
    """Say where the files that training begins from hold codes, and the model is to keep others."""
    weights = recipe.model.weights
    if weights is None or recipe.names["quantization"] == ("none",) or quantization_for(weights) is None:
        return
    model = undivided(recipe, vocab_size)
    filling = weights_for(weights_of(weights), model)
    if any(filling.codes(name) is None for name in islice(model.quantized, 1)):
        say(
            f"warning: {weights} holds other codes than quantization says, so that what they stand for is quantized anew, which loses more;"
            " give quantization the options of the files"
        )


def check_files(recipe: Recipe, vocab_size: int, checkpoint: Reader | None, ranks: Ranks) -> None:
    """Refuse on every rank what one of them cannot begin from, unless there is nothing to do. Collective.

    Raises:
        UserError: weights are missing, or do not fit the model.
    """
    if checkpoint is not None and checkpoint.state()["step"] >= recipe.train.max_steps:
        return
    problem = ""
    try:
        check_beginning(recipe, vocab_size, checkpoint)
    except UserError as error:
        problem = str(error)
    for told in ranks.gather(problem):
        if told:
            raise UserError(told)


def open_data(recipe: Recipe, say: Say) -> tuple[Corpus, Batches, int]:
    """The data, prepared; how it is laid out in batches; and rows of the embedding.

    Raises:
        UserError: it is missing, or does not fit the model or the objective.
    """
    recipe.data.prepare(say)
    corpus = recipe.data.open(recipe.train.sequence_length)
    recipe.objective.check_data(corpus)
    if cut := corpus.facts.get(CUT_OFF):
        say(
            f"warning: of {cut:,} of {len(corpus.train):,} samples nothing is left to learn: prompts fill"
            f" train.sequence_length={recipe.train.sequence_length}; raise it, or leave such records out"
        )
    own, needed = recipe.model.vocab_size, corpus.tokenizer.vocab_size
    if own is not None and own < needed:
        place = recipe.config.origin(("model", "vocab_size"))
        raise UserError(f"{place}: model.vocab_size {own} is smaller than the tokenizer's {needed}; raise it, or use the model's own")
    if note := foreign(recipe.model.weights, corpus.tokenizer):
        say(f"warning: {note}")
    return corpus, arrange(recipe, corpus, say), own or needed


def note(recipe: Recipe, device: torch.device) -> None:
    """Say what there is to know of plugins before the run."""
    for advice in recipe.advice:
        say(f"warning: {advice}")
    if text := recipe.step_spec(device).optimizer.note:
        say(text)
    computes = {phase.policy.compute for phase in recipe.precision.phases()} - {torch.float32}
    if device.type == "cpu" and (slow := [str(dtype).removeprefix("torch.") for dtype in computes if not multiplies(dtype)]):
        say(f"this processor has no products in {slow[0]}: they take several times as long as those of precision=fp32")
    if recipe.names["peft"] != ("none",) and recipe.model.weights is None:
        say("the base has initial values, and checkpoints hold adapters alone; to begin from a model: model={name: auto, path: DIRECTORY}")


def note_kernels(world: World, device: torch.device) -> None:
    """Say where this host cannot compile kernels that were asked for; for one rank of each host."""
    if device.type == "cpu" and (why := missing()):
        host = "" if world.is_first else f"on {socket.gethostname()} "
        say(f"{host}CPU kernels are not compiled, and training takes torch's operators: {why}")


def device_of(recipe: Recipe, world: World) -> torch.device:
    """What a rank computes on.

    Raises:
        UserError: the host has no such device, or not one for each rank.
    """
    wanted = recipe.launch.accelerator
    place = recipe.config.origin(("launch", "accelerator"))
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"{place}: launch.accelerator=cuda, but torch sees no CUDA device here")
    if world.local_size > torch.cuda.device_count():
        bound = any(os.environ.get(name) for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK"))
        instead = "; where srun shows each rank its own alone (--gpus-per-task), give --gpus-per-node instead" if bound else ""
        raise UserError(
            f"{place}: {world.local_size} ranks on a host with {torch.cuda.device_count()} GPUs; a rank needs one of its own{instead}"
        )
    return torch.device("cuda", world.local_rank)


def say(text: str) -> None:
    """To the user."""
    print(f"fw: {text}", file=sys.stderr, flush=True)


def say_nothing(text: str) -> None:
    """What every rank knows, the first one says."""
