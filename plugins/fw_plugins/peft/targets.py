"""Modules chosen by the names that they have in Hugging Face's files, by the rules of peft."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

from fw.api import CausalLM, HFTensor, UserError, did_you_mean

ALL_LINEAR = "all-linear"
T = TypeVar("T")


def names_in_files(model: CausalLM) -> dict[str, HFTensor]:
    """For each module whose weight is one tensor of a file, that tensor, its name without ``.weight``."""
    found = {}
    weights = model.stored()
    for name, _ in model.named_modules():
        if f"{name}.weight" in weights:
            tensors = model.hf_tensors(f"{name}.weight")
            if len(tensors) == 1 and tensors[0].name.endswith(".weight"):
                found[name] = HFTensor(tensors[0].name.removesuffix(".weight"), transposed=tensors[0].transposed)
    return found


def tied_heads(model: CausalLM) -> dict[str, str]:
    """For each module that has another's weight, an output head that is the embedding, that other one; by their names in files."""
    pairs = model.hf_repeated().items()
    return {name.removesuffix(".weight"): of.removesuffix(".weight") for name, of in pairs if name.endswith(".weight")}


def chosen(
    model: CausalLM, files: Mapping[str, HFTensor], patterns: Sequence[str], exclude: Sequence[str], as_peft: bool = False
) -> list[str]:
    """Names of the linear layers and embeddings that ``patterns`` mean, in the model's order.

    A pattern is the end of a name, as ``q_proj`` or ``layers.0.self_attn.q_proj``, or a regular expression of a whole name (peft tells
    these apart by whether there is one pattern or a list; here, by whether it holds more than letters, digits, ``_``, ``-`` and dots).
    ``all-linear`` is every linear layer but the head.

    Args:
        as_peft: the patterns are of an adapter that is read: what names nothing beside others that name something is let pass, as peft
            does.

    Raises:
        UserError: a pattern names nothing, or nothing that LoRA can change, or a head that has no weight of its own.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding) and name in files}
    inside = {id(module) for block in model.blocks for module in block.modules()}
    tied = {head: of for head, of in tied_heads(model).items() if not any(matches(pattern, head) for pattern in exclude)}
    heads = {n for n, m in layers.items() if isinstance(m, nn.Linear) and m.out_features == model.vocab_size and id(m) not in inside}
    picked: set[str] = set()

    def means(pattern: str, name: str) -> bool:
        own = files[name].name
        return matches(pattern, own) or matches(pattern, model.hf_module_name(own))

    for pattern in patterns:
        if pattern == ALL_LINEAR:
            found = {name for name, module in layers.items() if isinstance(module, nn.Linear) and name not in heads}
        else:
            found = {name for name in layers if means(pattern, name)}
        if (not found or as_peft) and (head := next((head for head in tied if matches(pattern, head)), None)):
            raise UserError(
                f"peft.targets: '{pattern}' means {head}, which has the weight of {tied[head]} here, so that it cannot be changed alone;"
                " leave it out (an adapter of peft's that changes it can be merged: fw checkpoint merge)"
            )
        if not found and not as_peft:
            ends = dict.fromkeys(files[name].name.rpartition(".")[2] for name in layers)
            others = [name for name in files if matches(pattern, files[name].name)] if pattern != ALL_LINEAR else []
            what = f"is no linear layer or embedding ({others[0]})" if others else "names no layer of this model"
            raise UserError(f"peft.targets: '{pattern}' {what}{did_you_mean(pattern, ends)} (there are: {', '.join(ends)}, {ALL_LINEAR})")
        picked |= found
    if not picked:
        raise UserError(f"peft.targets: {', '.join(patterns)} name no layer of this model")
    for pattern in exclude:
        left_out = {name for name in picked if means(pattern, name)}
        if not left_out and not as_peft:
            raise UserError(f"peft.exclude: '{pattern}' names none of what peft.targets does")
        picked -= left_out
    if not picked:
        raise UserError("peft.exclude: nothing is left of what peft.targets names")
    return [name for name in layers if name in picked]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern means a module."""
    if re.fullmatch(r"[\w.-]+", pattern):
        return name == pattern or name.endswith(f".{pattern}")
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UserError(f"peft: '{pattern}' is no regular expression ({error})") from None


def by_pattern(values: Mapping[str, T], name: str, default: T) -> T:
    """What the first pattern that names the module gives it; patterns are regular expressions of the end of a name."""
    return next((value for pattern, value in values.items() if re.match(rf"(.*\.)?({pattern})$", name)), default)


def shortest(names: Sequence[str], others: Sequence[str]) -> list[str]:
    """Module names as ``target_modules`` lists them: their last parts where these name nothing else."""
    ends = sorted({name.rpartition(".")[2] for name in names})
    strangers = [other for other in others if other not in names and other.rpartition(".")[2] in ends]
    return sorted(names) if strangers else ends
