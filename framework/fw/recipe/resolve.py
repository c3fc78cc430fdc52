"""Resolving a config: names first, then options into each plugin's own dataclass, then the rules between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, cast

import torch

from fw import registry
from fw.config import (
    DEFAULT,
    PLUGINS,
    Config,
    LaunchSection,
    LoaderSection,
    MemorySection,
    Origin,
    TrainSection,
    check_interpolations,
    fill,
    interpolated,
)
from fw.errors import UserError
from fw.kinds import KINDS
from fw.kinds.activation import ActivationPlugin
from fw.kinds.attention import AttentionPlugin
from fw.kinds.checkpoint import CheckpointPlugin
from fw.kinds.data import DataPlugin, Rows
from fw.kinds.launcher import LauncherPlugin
from fw.kinds.logger import LoggerPlugin
from fw.kinds.model import ModelPlugin
from fw.kinds.objective import ObjectivePlugin
from fw.kinds.offload import OffloadPlugin, OffloadPolicy
from fw.kinds.optimizer import OptimizerPlugin
from fw.kinds.peft import PeftPlugin
from fw.kinds.precision import PrecisionPlugin
from fw.kinds.quantization import QuantizationPlugin
from fw.kinds.schedule import SchedulePlugin
from fw.kinds.sharding import REPLICATE, SHARD, TENSOR, ShardingPlugin, StepSpec
from fw.place import Place, place
from fw.recipe import batch, rules
from fw.recipe.choosing import Pick, check_sections, choose, load_plugins, options_in, with_defaults
from fw.recipe.saving import check_saving
from fw.recipe.world import World, current_world, world_size
from fw.registry import Plugin

SECTIONS: dict[str, type] = {"train": TrainSection, "loader": LoaderSection, "launch": LaunchSection, "memory": MemorySection}
RESUME = "resume"
KINDS_OF_A_RUN = {name: kind for name, kind in KINDS.items() if kind.of == "run"}
GENERATING = {
    **dict.fromkeys(["inference", *(name for name, kind in KINDS.items() if kind.of != "run")], "give it to fw generate"),
    "serve": "give it to fw serve",
}


@dataclass(frozen=True)
class Recipe:
    """Everything a run is made of, decided before it starts and the same on every rank. Holds no tensors."""

    config: Config
    model: ModelPlugin
    quantization: QuantizationPlugin
    peft: PeftPlugin
    attention: AttentionPlugin
    data: DataPlugin
    objective: ObjectivePlugin
    precision: PrecisionPlugin
    sharding: ShardingPlugin
    activation: ActivationPlugin
    offload: OffloadPlugin
    optimizer: OptimizerPlugin
    schedule: SchedulePlugin
    checkpoint: CheckpointPlugin
    loggers: tuple[LoggerPlugin, ...]
    launcher: LauncherPlugin
    train: TrainSection
    loader: LoaderSection
    launch: LaunchSection
    memory: MemorySection
    resume: str
    world_size: int
    mesh_shape: Mapping[str, int]
    micro_batch_size: int
    names: Mapping[str, tuple[str, ...]]
    tree: Mapping[str, Any]
    advice: tuple[str, ...]
    """What to know of its plugins before it starts, a sentence each."""

    @property
    def replicas(self) -> int:
        """Groups of ranks that see different samples; the ranks of a group are consecutive."""
        return _replicas(self.mesh_shape)

    @property
    def copies(self) -> int:
        """Ranks that compute the same loss: those that divide layers between them."""
        return self.mesh_shape.get(TENSOR, 1)

    def step_spec(self, device: torch.device, rows: Rows | None = None) -> StepSpec:
        """What the step is to honour on ``device``.

        Args:
            rows: of the data; None where it is not known, or what it decides does not matter.
        """
        rows = rows or Rows()
        by_lengths = rows.vary and self.train.max_tokens_per_batch is not None
        offload = self.offload.policy()
        runs_on = device if offload.optimizer == "device" else torch.device("cpu")
        return StepSpec(
            self.precision.policy(),
            offload,
            self.optimizer.spec(runs_on),
            self.train.gradient_clip_norm,
            None if by_lengths else self.micro_batch_size,
            None if by_lengths else self.accumulation,
            self.ranks_per_host,
            device.type,
            rows.vary,
            rows.segments,
            tuple(phase.policy for phase in self.precision.phases()),
            self.train.ema_decay > 0,
        )

    @property
    def steps_in_backward(self) -> bool:
        """Whether weights change during backward already."""
        return self.optimizer.spec(torch.device("cpu")).in_backward

    @property
    def ranks_per_host(self) -> int:
        """As the launcher says, or will start them."""
        world = current_world()
        return world.local_size if world.launched else max(1, self.world_size // self.launch.nodes)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on one rank; where tokens bound them, of samples that all have ``train.sequence_length``."""
        return -(-self.train.global_batch_size // (self.micro_batch_size * self.replicas))

    @property
    def run_dir(self) -> FilePath:
        """The run's directory, as given or by default."""
        return FilePath(self.train.run_dir or f"runs/{self.config.name}")

    @property
    def checkpoints(self) -> Place:
        """Where the run's checkpoints go."""
        return place(self.checkpoint.config.to or self.run_dir / "checkpoints")

    def origins(self) -> dict[tuple[str, ...], Origin]:
        """Every value of :attr:`tree` by its path, and where it came from."""
        return {path: self._origin(path) for path in _leaves(self.tree)}

    def _origin(self, path: tuple[str, ...]) -> Origin:
        if path in self.config.origins:
            return self.config.origins[path]
        if path[-1] == "name" and path[:-1] in self.config.origins:  # the short form, kind: name
            return self.config.origins[path[:-1]]
        return DEFAULT

    def plugin_versions(self) -> dict[str, str]:
        """``kind.name`` → distribution and version, for the record."""
        found = {}
        for kind, names in self.names.items():
            for name in names:
                entry = registry.entry_of(kind, name)
                found[f"{kind}.{name}"] = f"{entry.distribution} {entry.version}"
        return found


def resolve(config: Config, world: World | None = None, *, starts: bool = True) -> Recipe:
    """Turn a config into a recipe.

    Args:
        starts: whether ranks may be started by it, so that hosts must know where to meet.

    Raises:
        UserError: unknown section, plugin or option, wrong type, rules broken, or a batch or mesh that does not divide.
    """
    check_sections(config, [*KINDS_OF_A_RUN, *SECTIONS, RESUME, PLUGINS, "extends"], GENERATING)
    check_interpolations(config)
    files = load_plugins(config)
    chosen = {name: choose(kind, config) for name, kind in KINDS_OF_A_RUN.items()}
    root = with_defaults(config, chosen, SECTIONS)

    made: dict[str, list[tuple[str, Plugin]]] = {}
    tree: dict[str, Any] = {}
    for kind, picks in chosen.items():
        made[kind] = []
        for pick in picks:
            options: Any = fill(pick.cls.Config, config, pick.path, pick.options, root)
            made[kind].append((pick.name, pick.cls(options)))
        written = [{"name": p.name, **dataclasses.asdict(plugin.config)} for p, (_, plugin) in zip(picks, made[kind], strict=True)]
        tree[kind] = written if KINDS[kind].many else written[0]

    train = fill(TrainSection, config, ("train",), options_in(config, "train"), root)
    loader = fill(LoaderSection, config, ("loader",), options_in(config, "loader"), root)
    launch = fill(LaunchSection, config, ("launch",), options_in(config, "launch"), root)
    memory = fill(MemorySection, config, ("memory",), options_in(config, "memory"), root)
    sections = {"train": train, "loader": loader, "launch": launch, "memory": memory}
    tree |= {name: dataclasses.asdict(section) for name, section in sections.items()}  # type: ignore[call-overload]
    tree[RESUME] = resume = _resume(config)
    if files:
        tree[PLUGINS] = files

    rules.check(made, config)
    if train.deterministic:
        rules.check_deterministic(made, config)
    _check_measured(config, train, memory)
    size = world_size(launch, config, world or World())
    launcher = cast(LauncherPlugin, made["launcher"][0][1])
    if starts and launcher.needs_rendezvous and launch.nodes > 1 and not launch.rendezvous and not (world and world.launched):
        raise UserError(
            f"{config.origin(('launch', 'nodes'))}: launch.nodes: {launch.nodes} hosts need launch.rendezvous=HOST:PORT,"
            f" an address of one of them"
        )
    if starts and (size > 1 or launch.max_restarts > 0) and not (world and world.launched):
        _check_known_to_all(config, chosen)
    sharding = cast(ShardingPlugin, made["sharding"][0][1])
    try:
        mesh_shape = sharding.mesh_shape(size)
    except UserError as error:
        raise UserError(f"{config.origin(('sharding',))}: {error}") from None
    offload = cast(OffloadPlugin, made["offload"][0][1]).policy()
    _check_parameters(config, offload, cast(ModelPlugin, made["model"][0][1]))
    check_saving(
        config,
        cast(CheckpointPlugin, made["checkpoint"][0][1]).config,
        train,
        offload,
        starts_processes=size > 1 or launch.max_restarts > 0,
    )
    one = {kind: plugins[0][1] for kind, plugins in made.items() if not KINDS[kind].many}
    return Recipe(
        config=config,
        loggers=tuple(cast(LoggerPlugin, plugin) for _, plugin in made["logger"]),
        train=train,
        loader=loader,
        launch=launch,
        memory=memory,
        resume=resume,
        world_size=size,
        mesh_shape=mesh_shape,
        micro_batch_size=batch.micro_batch_size(train, _replicas(mesh_shape), config),
        names={kind: tuple(name for name, _ in plugins) for kind, plugins in made.items()},
        tree=tree,
        advice=rules.advice(made),
        **cast(dict[str, Any], one),
    )


def _check_known_to_all(config: Config, chosen: Mapping[str, Sequence[Pick]]) -> None:
    """Ranks are processes of their own, which know what the config names."""
    for kind, picks in chosen.items():
        for pick in picks:
            if registry.only_here(kind, pick.name):
                raise UserError(
                    f"{config.origin((kind,))}: {kind} '{pick.name}' was registered in this process alone, and ranks are processes of"
                    f" their own; put it into a file and name that: plugins: [./FILE.py]"
                )


def _replicas(mesh_shape: Mapping[str, int]) -> int:
    return mesh_shape.get(REPLICATE, 1) * mesh_shape.get(SHARD, 1)


def _check_parameters(config: Config, offload: OffloadPolicy, model: ModelPlugin) -> None:
    """Where parameters are to stay in files, there are some."""
    place = config.origin(("offload", "params"))
    if offload.params_in_files:
        if model.weights is None:
            raise UserError(
                f"{place}: offload.params: nvme leaves weights in the files that training begins from, and it begins from none: set"
                " model.path, or offload.path, a directory on the disk"
            )
        if offload.automatic and offload.budget is None and offload.host_budget is None:
            raise UserError(
                f"{place}: offload.params: auto: a run does not find out what frozen weights may take of memory; say it, as in"
                " offload.max_memory='{cpu: 4GiB}'"
            )
        return
    if offload.params == "cpu":  # sharding says whether it brings all or some
        return
    for name, given in (("budget", offload.budget is not None), ("modules", offload.modules)):
        if given:
            place = config.origin(("offload", name))
            raise UserError(
                f"{place}: offload.{name} is of weights that stay in the model's files (params: nvme, without a path), or on a GPU's host"
                " (params: cpu); leave it out"
            )


def _check_measured(config: Config, train: TrainSection, memory: MemorySection) -> None:
    """Steps that are to be measured or traced come to be."""
    for name, step in (("measure_step", memory.measure_step), ("trace_step", memory.trace_step)):
        if step > train.max_steps:
            place = config.origin(("memory", name))
            raise UserError(
                f"{place}: memory.{name}: there is no step {step}, since train.max_steps is {train.max_steps}; name one there is"
            )
    if memory.trace_step and memory.measures(memory.trace_step):
        place = config.origin(("memory", "trace_step"))
        raise UserError(f"{place}: memory.trace_step: step {memory.trace_step} is measured by memory.measure_step; name another")


def _resume(config: Config) -> str:
    value = config.tree.get(RESUME)
    value = interpolated(value, config, (RESUME,)) if isinstance(value, str) else value
    if value in (None, False, ""):
        return ""
    if not isinstance(value, str):
        raise UserError(f"{config.origin((RESUME,))}: resume is 'auto' or the path of a checkpoint, not {value!r}")
    return value


def _leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, str(key)))]
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return [leaf for i, inner in enumerate(value) for leaf in _leaves(inner, (*path, str(i)))]
    return [path]
