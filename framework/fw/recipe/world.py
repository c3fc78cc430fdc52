"""Which rank this process is, as torchrun or srun says it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from fw.config import Config, LaunchSection
from fw.errors import UserError


@dataclass(frozen=True)
class World:
    """``launched`` is False in a process that the user started and no launcher did."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    launched: bool = False

    @property
    def on_one_host(self) -> bool:
        """Whether no other host takes part."""
        return self.size <= self.local_size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes the run directory."""
        return self.rank == 0


def current_world(environment: MutableMapping[str, str] | None = None) -> World:
    """Read torchrun's variables; under srun, translate SLURM's into them first.

    Raises:
        UserError: the variables are there but make no sense.
    """
    env = os.environ if environment is None else environment
    try:
        if "RANK" not in env and "SLURM_STEP_ID" in env and int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            env.update(_from_slurm(env))
    except ValueError as error:
        raise UserError(f"environment: SLURM's numbers make no sense ({error})") from None
    if "RANK" not in env or "WORLD_SIZE" not in env or _is_pod(env):
        return World()
    env.setdefault("LOCAL_RANK", "0")  # for those who read it after us
    try:
        size, rank = int(env["WORLD_SIZE"]), int(env["RANK"])
        local_rank = int(env.get("LOCAL_RANK", "0"))
        local_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
    except ValueError as error:
        raise UserError(f"environment: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE must be numbers ({error})") from None
    if not 0 <= rank < size:
        raise UserError(f"environment: RANK={rank} is not below WORLD_SIZE={size}")
    return World(size, rank, local_rank, local_size, launched=True)


def _from_slurm(env: Mapping[str, str]) -> dict[str, str]:
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):
        if name not in env:
            raise UserError(
                f"environment: SLURM_STEP_NUM_TASKS={env['SLURM_STEP_NUM_TASKS']}, but {name} is missing; start ranks with srun"
            )
    size, job = int(env["SLURM_STEP_NUM_TASKS"]), int(env.get("SLURM_JOB_ID", "0"))
    nodes = int(env.get("SLURM_STEP_NUM_NODES", env.get("SLURM_NNODES", "1")))
    return {
        "WORLD_SIZE": str(size),
        "RANK": env["SLURM_PROCID"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(size // nodes),
        "MASTER_ADDR": env.get("MASTER_ADDR") or _first_host(env.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        # A port of the step's own, so that two jobs on one host, or two steps of a job, rarely meet; where they do, they notice.
        "MASTER_PORT": env.get("MASTER_PORT") or str(20000 + (job * 31 + int(env.get("SLURM_STEP_ID", "0"))) % 10000),
    }


def _is_pod(env: Mapping[str, str]) -> bool:
    """Whether RANK is that of a pod, not of a process: Kubeflow's operators number pods and leave the processes to a launcher."""
    return "LOCAL_RANK" not in env and ("PET_NODE_RANK" in env or "PET_NNODES" in env)


def _first_host(nodes: str) -> str:
    """``host[003-007,012],other`` → ``host003``."""
    match = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", nodes)
    return (match[1] + (match[2] or "")) if match else nodes


def world_size(launch: LaunchSection, config: Config, world: World) -> int:
    """Ranks of the run.

    Raises:
        UserError: a launcher has started another number of ranks than the config asks for.
    """
    asked = launch.devices * launch.nodes
    if not world.launched:
        return asked
    if asked != world.size and (config.was_set("launch", "devices") or config.was_set("launch", "nodes")):
        path = ("launch", "devices") if config.was_set("launch", "devices") else ("launch", "nodes")
        raise UserError(
            f"{config.origin(path)}: launch.devices × launch.nodes is {asked}, but the launcher started {world.size} ranks;"
            f" leave both out under torchrun or srun"
        )
    return world.size
