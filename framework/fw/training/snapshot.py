"""What a run puts into its checkpoints."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from fw.assemble import Assembly
from fw.averaging import AveragedWeights
from fw.checkpointing.tensor_files import ADAPTER, AVERAGE
from fw.kinds.checkpoint import Part, Snapshot, adapter_parts, parts
from fw.locate import ADAPTER_CONFIG, CONFIG
from fw.recipe import Recipe
from fw.training import run_dir
from fw.training.module import TrainingModule
from fw.training.resume import must_agree
from fw.training.rng import rng_state
from fw.training.same_tokenizer import misread

GENERATION = "generation_config.json"


def tensors(made: Assembly) -> dict[str, dict[str, Part]]:
    """The groups of tensors of a run as it stands."""
    stepper, model = made.stepper, made.model
    # A buffer is copied: while a step's tensors are still being saved, the next forward may change it.
    stored = {
        name: tensor.detach() if isinstance(tensor, nn.Parameter) or name in model.elsewhere else tensor.clone()
        for name, tensor in model.stored().items()
    }
    kept = {**stored, **stepper.weights()}
    weights = {"model": parts(model, kept)} if model.adapters is None else {ADAPTER: adapter_parts(model.adapters, kept)}
    if isinstance(stepper, AveragedWeights):
        seen = {**kept, **stepper.average}
        weights[AVERAGE] = parts(model, seen) if model.adapters is None else adapter_parts(model.adapters, seen)
    return {
        **weights,
        "optimizer": {name: Part(tensor) for name, tensor in stepper.optimizer_tensors().items()},
    }


def snapshot(recipe: Recipe, module: TrainingModule, metrics: Mapping[str, float], parent: str | None) -> Snapshot:
    """A run as it stands.

    Args:
        metrics: of this step.
        parent: the checkpoint before this one.
    """

    def write_files(directory: Path) -> None:
        model, tokenizer = module.assembly.model, module.corpus.tokenizer
        if model.adapters is None:
            hf = {**model.hf_config(), "dtype": str(recipe.precision.policy().parameters).removeprefix("torch.")}
            for key, token_id in (("bos_token_id", tokenizer.bos_id), ("eos_token_id", tokenizer.eos_id)):
                if hf.get(key) is None:
                    hf[key] = token_id
            (directory / CONFIG).write_text(json.dumps(hf, indent=1) + "\n")
        else:
            base = str(recipe.model.weights.resolve()) if recipe.model.weights is not None else None
            adapter = {**model.adapters.config, "base_model_name_or_path": base}
            (directory / ADAPTER_CONFIG).write_text(json.dumps(adapter, indent=1) + "\n")
        tokenizer.save(directory)
        if note := misread(directory, tokenizer):
            print(f"fw: warning: {note.replace(str(directory), 'the checkpoint')}", file=sys.stderr)
        if recipe.model.weights is not None and (recipe.model.weights / GENERATION).is_file():
            shutil.copyfile(recipe.model.weights / GENERATION, directory / GENERATION)
        run_dir.describe(recipe, directory)

    return Snapshot(
        step=module.global_step,
        tensors=tensors(module.assembly),
        rng=rng_state(module.strategy.root_device),
        state={
            "step": module.global_step,
            "tokens": module.tokens_seen,
            "scalars": module.assembly.stepper.scalars(),
            "data": module.corpus.fingerprint,
            "samples": [len(module.corpus.train), len(module.corpus.val)],
            "loader": {"samples_seen": module.samples_seen},
            "schedule": {"name": recipe.names["schedule"][0], "factor": recipe.schedule.factor(module.global_step, recipe.train.max_steps)},
            "must_agree": {setting: value for setting, (value, _) in must_agree(recipe).items()},
        },
        write_files=write_files,
        mesh=dict(recipe.mesh_shape),
        metrics=metrics,
        parent=parent,
    )
