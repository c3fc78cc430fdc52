"""``fw train`` within a budget: what the run is made of is decided before any rank starts, and is the same on all."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fw import config as configuration
from fw.config import Config, overridden
from fw.errors import EXIT_FAILED, FwError, PeerError, UserError
from fw.launching import outcome
from fw.launching.meeting import next_run, told
from fw.meter.memory import forget_peak
from fw.planning.fitted import Fitted, fit_config, startable
from fw.planning.plan import device_of, plan_recipe
from fw.planning.tell_fit import cost, explanation
from fw.recipe import Recipe, World, current_world, resolve
from fw.training import run_dir
from fw.training.inputs import say, say_nothing
from fw.training.out_of_memory import OutOfMemory, is_out_of_memory, written
from fw.training.run import TrainResult, run
from fw.training.same_run import begun_by_this_torchrun

_MEASURED = 2
"""The step that is measured beside the plan, where nobody says: the first that is like those after it."""
_TIMEOUT = timedelta(hours=1)
_ADVISED = 3


def train(config: str | Path | Config, *overrides: str, compares: bool = True) -> TrainResult:
    """Train what a config describes; with ``memory.budget``, the fastest of what it leaves open that is predicted to fit.

    Args:
        config: a YAML file, or a config that is loaded already (then without overrides).
        overrides: ``key=value``, as on the command line.
        compares: whether a run whose memory is measured is planned, too.

    Raises:
        UserError: the config is wrong, or nothing fits.
        RunError: the run failed.
    """
    next_run()
    loaded = config if isinstance(config, Config) else configuration.load(config, overrides)
    if not _searches(loaded):
        return _run(loaded, _planned(loaded) if compares else {})
    chosen, files = _decided(loaded, current_world())
    return _run(overridden(loaded, chosen), files)


def _run(config: Config, files: Mapping[str, str]) -> TrainResult:
    """Run; where memory runs out, say what would have fitted."""
    try:
        result = run(config, files)
    except OutOfMemory as error:
        ran_out = str(error)
    else:
        ran_out = ""
    if ran_out:  # the error and its frames, which had the memory, are gone
        if not outcome.launched_by_fw():  # whose process says it
            _advise(config)
        raise OutOfMemory(ran_out)
    if result.exit_code == EXIT_FAILED and written(result.run_dir) is not None:
        _advise(config)
    return result


def _planned(config: Config) -> dict[str, str]:
    """A file with what is predicted, for a run whose memory is measured."""
    section, world = config.tree.get("memory"), current_world()
    measures = isinstance(section, Mapping) and bool(section.get("measure_step"))
    if not measures or outcome.launched_by_fw() or not world.is_first or dist.is_initialized():
        return {}
    recipe = resolve(config, world)
    try:
        document = plan_recipe(recipe, device_of(recipe, say), tell=say_nothing)
    except FwError as error:
        say(f"not planned: {error}")
        return {}
    gc.collect()
    forget_peak()
    return {run_dir.PLAN: json.dumps(document.as_json(), indent=1) + "\n"}


def _advise(config: Config) -> None:
    """What is planned to fit where the run did not, whatever the config sets; the fewest changes first, of these the fastest."""
    gc.collect()
    try:
        _, recipe = startable(config)
        report = written(recipe.run_dir)
        world = current_world()
        if report is None or (world.launched and report["rank"] != world.rank):
            return
        gpu = device_of(recipe, say_nothing)
        found = fit_config(config, budget=report["taken_bytes"] if gpu is None else None, all_open=True, tell=say_nothing)
    except Exception as error:
        if not isinstance(error, FwError) and not is_out_of_memory(error):
            raise
        say(f"what would have fitted cannot be planned: {error or 'no memory is left for it'}")
        return
    fitting = sorted(
        (each for each in found.fit.planned if each.taken <= found.fit.budget), key=lambda each: (len(each.choices), each.seconds)
    )
    least = configuration.format_size(int(found.fit.best.taken))
    if not fitting:
        say(f"nothing that fw can change would have fitted; {found.fit.best.label} takes least, {least}")
        return
    lines = [f"  {each.label}: {configuration.format_size(int(each.taken))}{cost(each, found.fit)}" for each in fitting[:_ADVISED]]
    say("\n".join(["would have fitted, by plan:", *lines]))


def _searches(config: Config) -> bool:
    """Whether there is a budget, and anything that may be changed for it. What is wrong with the section is said by resolving."""
    section = config.tree.get("memory")
    if not isinstance(section, Mapping) or not section.get("budget"):
        return False
    return section.get("techniques") != []


def _decided(config: Config, world: World) -> tuple[list[str], dict[str, str]]:
    """Overrides, and files for the run's directory."""
    if not world.launched or world.size == 1:
        return _decide(config)
    if not world.is_first:
        answer = json.loads(told(None, world.rank, world.size, _TIMEOUT))
        if "error" in answer:
            raise PeerError(f"rank 0: {answer['error']}")
        return answer["chosen"], {}
    try:
        chosen, files = _decide(config)
    except Exception as error:
        told(json.dumps({"error": outcome.describe(error)}), 0, world.size, _TIMEOUT)
        raise
    told(json.dumps({"chosen": chosen}), 0, world.size, _TIMEOUT)
    return chosen, files


def _decide(config: Config) -> tuple[list[str], dict[str, str]]:
    _, recipe = startable(config)
    if (earlier := _decided_before(recipe)) is not None:
        return earlier, {}
    found = fit_config(config)
    if not found.fit.fits:
        raise UserError(f"{recipe.config.origin(('memory', 'budget'))}: memory.budget: {_nothing(found)}")
    say(explanation(found.fit))
    chosen = [*found.config.overrides[len(config.overrides) :], "memory.techniques=[]"]  # ranks that are started by it search no more
    if not recipe.memory.measure_step:
        chosen.append(f"memory.measure_step={min(_MEASURED, recipe.train.max_steps)}")
    gc.collect()
    forget_peak()  # what a search took is no part of the run
    decision = {"budget": recipe.memory.budget, "techniques": recipe.memory.techniques, "chosen": chosen}
    return chosen, {
        run_dir.FIT: json.dumps(decision, indent=1) + "\n",
        run_dir.PLAN: json.dumps(found.document.as_json(), indent=1) + "\n",
    }


def _decided_before(recipe: Recipe) -> list[str] | None:
    """What the run that goes on was decided to be: its state would not fit another."""
    again = outcome.restarted_by_another() and begun_by_this_torchrun(recipe.run_dir)
    if not recipe.resume and not again:
        return None
    try:
        decision: dict[str, Any] = json.loads((recipe.run_dir / run_dir.FIT).read_text())
    except (OSError, ValueError):
        return None
    asked = (recipe.memory.budget, recipe.memory.techniques)
    return decision["chosen"] if (decision.get("budget"), decision.get("techniques")) == asked else None


def _nothing(found: Fitted) -> str:
    best = found.fit.best
    over = configuration.format_size(int(best.taken - found.fit.budget))
    kept = "; ".join(f"{name}: {why}" for name, why in found.fit.kept)
    return (
        f"nothing fits {configuration.format_size(found.fit.budget)}: {best.label} takes least, {over} more"
        f" (a budget of {configuration.format_size(int(best.taken))} would do{'; not searched: ' + kept if kept else ''})"
    )
