"""Norms that train while all else is frozen, as peft's LN_TUNING has it (Zhao et al. 2023, https://arxiv.org/abs/2312.11420).

peft trains copies of the modules; here they train themselves, so that the model without the adapter is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fw.api import CausalLM, HFTensor, UserError, did_you_mean
from fw_plugins.peft.changed import PREFIX
from fw_plugins.peft.targets import matches, names_in_files


def train_norms(model: CausalLM, patterns: Sequence[str], exclude: Sequence[str], as_peft: bool) -> tuple[dict[str, HFTensor], list[str]]:
    """Freeze all of the model but its norms, or those of them that ``patterns`` mean.

    Args:
        as_peft: the patterns are of an adapter that is read: what names nothing is let pass, as peft does.

    Returns:
        each parameter that trains, as a tensor of an adapter's file; the modules' names in files.

    Raises:
        UserError: a pattern means no norm, or nothing is left.
    """
    kinds = {name: model.get_submodule(name) for name in names_in_files(model)}
    norms = {name: of.name for name, of in names_in_files(model).items() if not isinstance(kinds[name], nn.Linear | nn.Embedding)}
    chosen = dict(norms) if not patterns else {}
    for pattern in patterns:
        found = {name: called for name, called in norms.items() if matches(pattern, called)}
        if not found and not as_peft:
            ends = dict.fromkeys(called.rpartition(".")[2] for called in norms.values())
            raise UserError(
                f"peft.config: target_modules: '{pattern}' is no norm{did_you_mean(pattern, ends)} (there are: {', '.join(ends)})"
            )
        chosen |= found
    for pattern in exclude:
        left_out = {name for name, called in chosen.items() if matches(pattern, called)}
        if not left_out and not as_peft:
            raise UserError(f"peft.config: exclude_modules: '{pattern}' names none of the norms that train")
        chosen = {name: called for name, called in chosen.items() if name not in left_out}
    if not chosen:
        raise UserError("peft.config: no norm of this model is left to train")
    model.requires_grad_(False)
    tensors = {}
    for name, called in chosen.items():
        for own, parameter in model.get_submodule(name).named_parameters(recurse=False):
            parameter.requires_grad_(True)
            (of,) = model.hf_tensors(f"{name}.{own}")
            tensors[f"{name}.{own}"] = replace(of, name=f"{PREFIX}{called}.ln_tuning_layers.{own}")
    return tensors, list(chosen.values())
