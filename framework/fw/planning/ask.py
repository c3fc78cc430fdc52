"""``fw.plan``, ``fw.fit`` and ``fw.profile``: what the command line asks too, as objects that show themselves."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from fw.config import Config, overridden
from fw.errors import UserError
from fw.meter.devices import find, on_device
from fw.meter.document import MemoryDocument
from fw.planned import planning_for
from fw.planning import fitted, profile as measuring
from fw.planning.generation import gpu_here, plan_generation
from fw.planning.page import page
from fw.planning.placing import placed, placed_here
from fw.planning.plan import CPU, plan as plan_run
from fw.planning.tell import table
from fw.planning.tell_fit import explanation
from fw.recipe.inference import resolve_inference
from fw.training.notebook import framed, plain


@dataclass(frozen=True, repr=False)
class Memory(MemoryDocument):
    """What each rank takes, in bytes; printed, the table of ``fw plan`` or ``fw profile``, and in a notebook its page.

    Attributes:
        how: ``planned`` or ``measured``.
    """

    how: str = "planned"

    @staticmethod
    def of(document: MemoryDocument, how: str) -> Memory:
        """The same document."""
        return Memory(**{field.name: getattr(document, field.name) for field in fields(MemoryDocument)}, how=how)

    def page(self) -> str | None:
        """As HTML by itself; None of what generates, of which there is a table alone."""
        return None if self.detail is None else page(self, self.how)

    def __repr__(self) -> str:
        return table(self, planned=self.how == "planned")

    def _repr_html_(self) -> str:
        whole = self.page()
        return plain(repr(self)) if whole is None else framed(whole)


@dataclass(frozen=True, repr=False)
class Chosen(fitted.Fitted):
    """A config that fits, or takes least: ``config`` may be given to ``fw.train``; printed, how it was found."""

    @property
    def memory(self) -> Memory:
        """The plan of what was chosen."""
        return Memory.of(self.document, "planned")

    def __repr__(self) -> str:
        return f"{explanation(self.fit)}\n\n{self.memory!r}"

    def _repr_html_(self) -> str:
        return framed(page(self.document, "planned", self.fit))


def plan(config: str | Path | Config, *overrides: str, world_size: int | None = None, device: str | None = None) -> Memory:
    """Predict what each rank takes, without a GPU, weights, or other processes.

    Args:
        config: a YAML file, or a config that is loaded already (then without overrides), of a training run; or a model directory or
            ``org/name`` of the hub, to generate with.
        overrides: ``key=value``, as on the command line.
        world_size: ranks; by ``launch`` where None.
        device: ``cpu``, a GPU of docs/memory.md, or the path of a YAML file that describes one; what the run would compute on here where
            None.

    Raises:
        UserError: the config is wrong, or the device, or something cannot be planned.
    """
    if isinstance(config, Config) or not is_model(config):
        return Memory.of(plan_run(config, *overrides, world_size=world_size, device=device), "planned")
    if world_size is not None:
        raise UserError("--world-size: is for training runs; ranks that generate are inference.tensor")
    given = overridden(Config("plan", {}, {}), [*overrides, *(["inference.device=cpu"] if device == CPU else [])])
    if device in (None, CPU):
        recipe = placed_here(config, resolve_inference(given))
        return Memory.of(plan_generation(config, recipe, gpu=gpu_here(recipe)), "planned")
    gpu = find(device, CPU)
    with planning_for(on_device(gpu)):
        recipe = resolve_inference(given)
    if recipe.inference.device == CPU:
        raise UserError(f"{given.origin(('inference', 'device'))}: inference.device: cpu, and --device asks what it takes on {device}")
    return Memory.of(plan_generation(config, placed(config, recipe, None, here=False, gpu=gpu), gpu=gpu), "planned")


def fit(config: str | Path | Config, *overrides: str, world_size: int | None = None, device: str | None = None) -> Chosen:
    """Search for the fastest run that is predicted to stay within ``memory.budget``, or within the device's memory where there is none.

    What a file or an override sets stays as it is; ``memory.techniques`` says what may be chosen of the rest.

    Args:
        config: of a training run, as :func:`plan` takes it.
        overrides: likewise.
        world_size: likewise.
        device: likewise.

    Raises:
        UserError: the config is wrong, or cannot be planned as it is.
    """
    found = fitted.fit(config, *overrides, world_size=world_size, device=device)
    return Chosen(found.config, found.fit, found.recipe)


def profile(config: str | Path, *overrides: str, steps: int = 3, timed: int | None = None, trace: str | Path | None = None) -> Memory:
    """Train for a few steps with every rank, and measure them.

    Args:
        config: a YAML file.
        overrides: ``key=value``, as on the command line.
        steps: whose memory is measured.
        timed: that follow and are timed; as many where None. The time of a step is not known without one.
        trace: a directory for a step's trace and where the time goes.

    Raises:
        UserError: the config is wrong.
        RunError: the run failed.
        KeyboardInterrupt: it was stopped by Ctrl-C.
    """
    into = None if trace is None else Path(trace)
    return Memory.of(measuring.profile(config, *overrides, steps=steps, timed=timed, trace=into), "measured")


def is_model(given: str | Path) -> bool:
    """Whether it names a model, and not a config."""
    path = Path(given)
    return path.is_dir() or not (path.exists() or path.suffix in (".yaml", ".yml"))
