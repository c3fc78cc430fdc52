"""A config, changed to the fastest that stays within its budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fw.bars import Bar
from fw.config import Config, overridden
from fw.errors import UserError
from fw.kinds.data import Say
from fw.meter.devices import Device, find
from fw.meter.document import MemoryDocument
from fw.planning.fit import Fit, Overrides, search
from fw.planning.host_speed import HostSpeed, threads_of
from fw.planning.plan import CPU, device_of, loaded, plan_recipe
from fw.planning.techniques import SHARDING, techniques
from fw.recipe import Recipe, current_world, resolve
from fw.training.inputs import say, say_nothing


@dataclass(frozen=True)
class Fitted:
    """A config that fits, or takes least, and how it was found."""

    config: Config
    fit: Fit
    recipe: Recipe

    @property
    def document(self) -> MemoryDocument:
        """The plan of what was chosen."""
        assert self.fit.best.document is not None
        return replace(self.fit.best.document, budget=self.fit.budget)


def fit(config: str | Path | Config, *overrides: str, world_size: int | None = None, device: str | None = None) -> Fitted:
    """Search for the fastest run that is predicted to stay within ``memory.budget``, or within the device's memory where there is none.

    What a file or an override sets stays as it is; ``memory.techniques`` says what may be chosen of the rest.

    Args:
        config, overrides, world_size, device: as :func:`fw.planning.plan.plan` takes them.

    Raises:
        UserError: the config is wrong, or cannot be planned as it is.
    """
    return fit_config(
        loaded(config, overrides, world_size), None if device in (None, CPU) else find(device or "", CPU), here=device is None
    )


def fit_config(
    config: Config,
    gpu: Device | None = None,
    *,
    here: bool = True,
    tell: Say = say,
    budget: int | None = None,
    all_open: bool = False,
) -> Fitted:
    """The same of a loaded config.

    Args:
        gpu: what to plan for, unless ``here``: then what the run would compute on.
        tell: takes what there is to say of the data.
        budget: bytes a rank, instead of the config's.
        all_open: what the config sets may be changed, too; one technique will do.
    """
    config, recipe = startable(config)
    gpu = device_of(recipe, say) if here else gpu
    speeds = None if gpu is not None else HostSpeed.measured(threads_of(recipe))
    first = plan_recipe(recipe, gpu, speeds, tell)
    assert first.budget is not None  # the device's memory, where nobody says

    def evaluate(given: Overrides) -> MemoryDocument:
        if not given:
            return first
        return plan_recipe(resolve(overridden(config, given), current_world(), starts=False), gpu, speeds, say_nothing)

    with Bar(desc="planning", unit=" plans") as bar:

        def planning(label: str) -> None:
            bar.set_postfix_str(label, refresh=False)
            bar.update()

        found = search(techniques(recipe, gpu, all_open=all_open), evaluate, budget or first.budget, planning, combines=not all_open)
    chosen = overridden(config, found.best.overrides)
    return Fitted(chosen, found, resolve(chosen, current_world(), starts=False))


def startable(config: Config) -> tuple[Config, Recipe]:
    """The config and its recipe. Several ranks of which nobody says how they divide the model each have all of it, to begin with.

    Raises:
        UserError: the config is wrong.
    """
    world = current_world()
    try:
        return config, resolve(config, world, starts=False)
    except UserError:
        if config.tree.get(SHARDING) is not None:
            raise
        divided = overridden(config, ["sharding=ddp"])
        try:
            recipe = resolve(divided, world, starts=False)
        except UserError:
            recipe = None
        if recipe is None or SHARDING not in recipe.memory.techniques:
            raise
        origins = {path: origin for path, origin in divided.origins.items() if path[0] != SHARDING}
        left_open = replace(divided, origins=origins)
        return left_open, replace(recipe, config=left_open)
