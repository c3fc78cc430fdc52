"""Which checkpoint a run goes on from, and what it puts into its own."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from fw.errors import RunError, UserError
from fw.kinds.checkpoint import Reader, Snapshot, parts
from fw.kinds.data import Corpus
from fw.launching.outcome import RESUME_FROM, launched_by_fw, restarted_by_another
from fw.recipe import Recipe, current_world
from fw.training import run_dir
from fw.training.module import TrainingModule, rng_state
from fw.training.same_tokenizer import misread

GENERATION = "generation_config.json"


def find(recipe: Recipe, corpus: Corpus) -> Reader | None:
    """The checkpoint to go on from, if any.

    Raises:
        UserError: it is no checkpoint, it is damaged, or going on from it would not be what it looks like.
    """
    plugin = recipe.checkpoint
    resume = os.environ.get(RESUME_FROM, recipe.resume) if launched_by_fw() else recipe.resume
    if restarted_by_another() and plugin.latest(recipe.run_dir / run_dir.CHECKPOINTS):
        resume = "auto"
    if not resume:
        return None
    place = recipe.config.origin(("resume",))
    if resume == "auto":
        path = plugin.latest(recipe.run_dir / run_dir.CHECKPOINTS)
        if path is None:
            return None
    else:
        given = Path(resume)
        path = plugin.latest(given) or plugin.latest(given / run_dir.CHECKPOINTS) or given
    try:
        reader = plugin.open(path)
        if current_world().rank == 0 and not launched_by_fw():  # else the launching process has verified it
            reader.verify()
    except (UserError, RunError) as error:
        raise UserError(f"{place}: {error}") from None
    if reader.state()["data"] != corpus.fingerprint:
        raise UserError(f"{place}: {path} was trained on other data than the config gives (tokens differ); use the same data section")
    for setting, (now, why) in _must_agree(recipe).items():
        before = reader.state()["must_agree"][setting]
        if before != now:
            raise UserError(f"{place}: {path} was trained with {setting}={before}, the config says {now}, which would change {why}")
    return reader


def _must_agree(recipe: Recipe) -> dict[str, tuple[Any, str]]:
    """What a resumed run must have in common with the run it goes on with, and what would change."""
    parameters = str(recipe.precision.policy().parameters).removeprefix("torch.")
    return {
        "train.seed": (recipe.train.seed, "the order of the data"),
        "train.sequence_length": (recipe.train.sequence_length, "what the data is cut into"),
        "optimizer": (recipe.names["optimizer"][0], "what the optimizer's state means"),
        "parameter dtype": (parameters, "what the optimizer's state means"),
    }


def save(recipe: Recipe, module: TrainingModule) -> Path:
    """Write a checkpoint of the run as it stands; collective.

    Raises:
        RunError: it could not be written; the checkpoints before it are untouched.
    """
    stepper, model = module.assembly.stepper, module.assembly.model

    def write_files(directory: Path) -> None:
        hf = {**model.hf_config(), "dtype": str(recipe.precision.policy().parameters).removeprefix("torch.")}
        tokenizer = module.corpus.tokenizer
        for key, token_id in (("bos_token_id", tokenizer.bos_id), ("eos_token_id", tokenizer.eos_id)):
            if hf.get(key) is None:
                hf[key] = token_id
        (directory / "config.json").write_text(json.dumps(hf, indent=1) + "\n")
        tokenizer.save(directory)
        if note := misread(directory, tokenizer):
            print(f"fw: warning: {note.replace(directory.name, directory.stem)}", file=sys.stderr)
        if recipe.model.weights is not None and (recipe.model.weights / GENERATION).is_file():
            shutil.copyfile(recipe.model.weights / GENERATION, directory / GENERATION)
        run_dir.describe(recipe, directory)

    snapshot = Snapshot(
        step=module.global_step,
        weights=parts(model, {**{name: tensor.detach() for name, tensor in model.stored().items()}, **stepper.weights()}),
        optimizer=stepper.optimizer_tensors(),
        rng=rng_state(module.strategy.root_device),
        state={
            "step": module.global_step,
            "tokens": module.tokens_seen,
            "scalars": stepper.scalars(),
            "data": module.corpus.fingerprint,
            "loader": {"samples_seen": module.samples_seen},
            "must_agree": {setting: value for setting, (value, _) in _must_agree(recipe).items()},
        },
        write_files=write_files,
    )
    return recipe.checkpoint.save(recipe.run_dir / run_dir.CHECKPOINTS, snapshot)
