"""Where weights go that a device may have no room for: on the device first, then in host memory, and what is left stays in files."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import torch

from fw.checkpointing.elsewhere import HOST_SHARE
from fw.config import format_size
from fw.errors import UserError
from fw.inference.prepare import SHARE, device_of
from fw.kinds.offload import OffloadPolicy
from fw.meter.devices import Device
from fw.meter.memory import available_bytes, host_memory
from fw.planning.generation import gpu_here, plan_generation
from fw.planning.plan import CPU
from fw.recipe.inference import InferenceRecipe

_TRIES = 3
"""What is left beside other weights may be less: a GPU's allocator keeps other segments."""


def placed(path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None, here: bool, gpu: Device | None) -> InferenceRecipe:
    """The recipe that says by bytes what ``offload.params: auto`` leaves to be found out, from what a plan says that all else takes.

    Args:
        here: whether it is for this machine, which is asked for what is free.
        gpu: that generates; None for the CPU.

    Raises:
        UserError: it does not fit with as few weights on the device as can be.
    """
    policy = recipe.offload
    if not policy.automatic:
        return recipe
    if gpu is None:
        policy = policy.on_cpu()
    elif policy.host_budget is None:
        policy = replace(policy, host_budget=_host_share() if here else inf)
    policy = replace(policy, automatic=False)
    if policy.budget is not None:
        return replace(recipe, offload=policy)
    whole = replace(recipe, offload=OffloadPolicy())
    budget = _free_here(recipe) if here and gpu is None and not recipe.inference.budget else recipe.inference.budget

    def within(tried: InferenceRecipe) -> InferenceRecipe:
        return replace(tried, inference=replace(tried.inference, budget=budget))

    if plan_generation(path, within(whole), adapter, gpu).fits:
        return whole
    leanest = plan_generation(path, within(replace(recipe, offload=policy)), adapter, gpu)
    assert leanest.budget is not None and leanest.generation is not None
    taken, parts = leanest.largest.taken, leanest.largest.at_peak
    if not leanest.fits:
        raise UserError(
            f"offload.params: auto: with as few weights on the device as can be, {format_size(parts['parameters'])}, it takes"
            f" {format_size(taken)} of {format_size(leanest.budget)}; give keys and values less (inference.kv_budget,"
            " inference.max_sequences), or keep weights in fewer bits (quantization)"
        )
    kv = parts["kv"] if recipe.inference.kv_budget else int(min(parts["kv"], SHARE * leanest.generation.kv_budget))
    inference = replace(recipe.inference, kv_budget=f"{kv}B")
    most = leanest.budget - (taken - parts["parameters"] - parts["kv"]) - kv
    for _ in range(_TRIES):
        tried = replace(recipe, inference=inference, offload=replace(policy, budget=most))
        try:
            plan = plan_generation(path, within(tried), adapter, gpu)
        except UserError:  # fewer than the fewest
            break
        if plan.fits:
            return tried
        most = plan.largest.at_peak["parameters"] - (plan.largest.taken - leanest.budget)
    return replace(recipe, inference=inference, offload=policy)


def placed_here(path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None = None) -> InferenceRecipe:
    """The same for this machine.

    Raises:
        UserError: likewise; a GPU of which nothing is known.
    """
    if not recipe.offload.automatic:
        return recipe
    policy = recipe.offload
    if policy.budget is not None and device_of(recipe.inference.device).type != CPU:  # no plan is needed, nor a device that is known
        host = _host_share() if policy.host_budget is None else policy.host_budget
        return replace(recipe, offload=replace(policy, automatic=False, host_budget=host))
    return placed(path, recipe, adapter, here=True, gpu=gpu_here(recipe))


def _free_here(recipe: InferenceRecipe) -> str:
    """For a rank: others may have much of the host's memory, this process too, and a container has a limit."""
    return f"{min(host_memory(), available_bytes(torch.device(CPU))) // recipe.inference.tensor}B"


def _host_share() -> int:
    return int(HOST_SHARE * available_bytes(torch.device(CPU)))
