"""Engines that load while the server itself is still being imported."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from fw.config import Config
from fw.errors import UserError
from fw.launching.child import Child
from fw.launching.cores import usable_cores
from fw.server.engine import start_process
from fw.server.messages import Begin
from fw.server.settings import Settings


class Starting:
    """The processes of all engines of a server.

    Attributes:
        begin: what each of them loads.
        begun: when, by the monotonic clock.
    """

    def __init__(self, settings: Settings) -> None:
        serve = settings.serve
        _check_host(settings.config, serve.replicas)
        adapter, threads = serve.adapter or None, _threads(serve.replicas)
        self.begin = Begin(settings.path, settings.config, adapter, settings.adapters, threads, serve.log_prompts)
        self.begun = time.monotonic()
        self.children: list[Child] = []
        try:
            for number in range(serve.replicas):
                self.children.append(start_process(self.begin, _visible(number, serve.replicas)))
        except BaseException:  # a signal, perhaps
            self.end()
            raise

    def end(self) -> None:
        """At once."""
        for child in self.children:
            child.end(patience=0)


def _check_host(config: Config, replicas: int) -> None:
    """Engines that start together would each take what is free.

    Raises:
        UserError: nobody has said what each may.
    """
    offload = config.tree.get("offload")
    if not isinstance(offload, Mapping) or offload.get("params") != "auto":
        return
    if replicas > 1 and "cpu" not in (offload.get("max_memory") or {}):
        raise UserError(
            f"offload.params: auto: {replicas} replicas share the host's memory; say what the weights of each may take of it, as in"
            " offload.max_memory='{cpu: 16GiB}'"
        )


def _threads(replicas: int) -> int | None:
    """Of several replicas each has its part of the processors; None for all."""
    return max(1, usable_cores() // replicas) if replicas > 1 else None


def _visible(number: int, replicas: int) -> dict[str, str] | None:
    """Of several replicas each has its part of the GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:  # an empty one says that none is wanted
        visible = _gpus()
    if replicas == 1 or not visible:
        return None
    devices = visible.split(",")
    each = max(1, len(devices) // replicas)
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices[(number * each) % len(devices) :][:each])}


def _gpus() -> str:
    """Of this machine, as numbers with commas; without asking torch, which this process does not have."""
    try:
        return ",".join(str(number) for number in range(len(os.listdir("/proc/driver/nvidia/gpus"))))
    except OSError:
        return ""
