"""The one Lightning strategy: ranks, their device mesh and their barriers. How the model is divided is not its business."""

from __future__ import annotations

import datetime
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from pytorch_lightning.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fw.checkpointing.ranks import GlooRanks, OneRank
from fw.errors import PeerError
from fw.kinds.checkpoint import Ranks
from fw.launching.meeting import group_store
from fw.launching.membership import join
from fw.recipe import World

joined = False
"""Whether this process has been in a process group. It must then end without finalizing the interpreter (:mod:`fw.cli`)."""


class MeshStrategy(ParallelStrategy):
    """Starts the process group and the mesh before the model is configured; wraps, moves and saves nothing.

    Lightning's own distributed strategies each own a way of sharding. Here sharding plugins own theirs, inside ``configure_model``, so
    that one strategy serves all of them, on the CPU (gloo) and on GPUs (nccl, with gloo for what lives on the host).
    """

    def __init__(
        self, world: World, mesh_shape: Mapping[str, int], device: torch.device, timeout_seconds: int, save_timeout_seconds: int
    ) -> None:
        environment: ClusterEnvironment = TorchElasticEnvironment() if world.launched else LightningEnvironment()
        super().__init__(cluster_environment=environment)
        self._world = world
        self._mesh_shape = dict(mesh_shape)
        self._device = device
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._save_timeout = datetime.timedelta(seconds=save_timeout_seconds)
        self.mesh: DeviceMesh | None = None
        self.ranks: Ranks = OneRank()
        """Those that save and verify together, once joined."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return self._device

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group."""
        return bool(self._mesh_shape)

    def setup_environment(self) -> None:
        """Join the process group and build the mesh."""
        super().setup_environment()
        self.join()
        if self._mesh_shape and self.mesh is None:
            names, sizes = tuple(self._mesh_shape), tuple(self._mesh_shape.values())
            self.mesh = init_device_mesh(self._device.type, sizes, mesh_dim_names=names)

    def join(self) -> None:
        """Join the process group, unless this rank is in one already, and the groups that saving has of its own. Collective."""
        if not self._mesh_shape:
            return
        if not dist.is_initialized():
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            backend = "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"
            global joined
            joined = True
            try:
                store = self._store()
                join(backend, store=store, rank=self._world.rank, world_size=self._world.size, timeout=self._timeout)
            except dist.DistError as error:
                where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
                text = str(error).splitlines()[0]
                raise PeerError(f"not all {self._world.size} ranks have met at {where} ({text})") from error
        if self._world.size > 1 and self.ranks.size == 1:
            self.ranks = GlooRanks(self._save_timeout)

    def _store(self) -> dist.Store:  # type: ignore[name-defined]
        """Where the ranks meet."""
        if self._world.launched:
            return group_store(self._world.rank, self._world.size, self._timeout)
        return dist.HashStore()  # type: ignore[attr-defined]  # a world of one rank needs nobody to meet

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """No default device: what is built says where it belongs, and what is drawn is drawn on the host."""
        yield

    def model_to_device(self) -> None:
        """The model was made where it belongs."""

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """A rank's object on all ranks."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Tensor | Any:
        """Sum or mean over all ranks."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total / self._world.size if reduce_op in (None, "mean", "avg") else total

    def gather(self, value: Any) -> list[Any]:
        """What each rank has, by rank."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, value)
        return values

    def sum_on_host(self, values: list[float]) -> list[float]:
        """Sums over all ranks of a few numbers; waits for no GPU."""
        return self._reduce_on_host(values, dist.ReduceOp.SUM)

    def max_on_host(self, values: list[float]) -> list[float]:
        """The largest over all ranks of a few numbers; waits for no GPU."""
        return self._reduce_on_host(values, dist.ReduceOp.MAX)

    def _reduce_on_host(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if not dist.is_initialized():
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation)
        reduced: list[float] = tensor.tolist()
        return reduced

    def teardown(self) -> None:
        """Leave the process group to :func:`leave`: what follows fit still needs it."""
        assert self.accelerator is not None
        self.precision_plugin.teardown()
        self.accelerator.teardown()
