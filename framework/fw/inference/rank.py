"""A process with a part of a model's layers: does what the first rank says, until that is gone."""

from __future__ import annotations

import mmap
import pickle
from contextlib import nullcontext
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from fw.inference.adapters import Adapter
from fw.inference.cached import Piece
from fw.inference.divided import Several
from fw.inference.mirrored import Echo
from fw.inference.prepare import Prepared, device_of, prepare
from fw.inference.ranks import HERE, OPTION, Start
from fw.kernels.threads import alone
from fw.kinds.kv_cache import Stretch
from fw.launching.child import ended, joined
from fw.planned import made_current
from fw.recipe.choosing import load_plugins


class Further(Several):
    """One that is told."""

    def __init__(self, start: Start, connection: Connection[Any, Any], memory: mmap.mmap | None) -> None:
        self._connection = connection
        device = device_of(start.recipe.inference.device, start.rank)
        super().__init__(start.rank, start.ranks, OPTION, start.joined(memory, device))

    def agreed(self, value: int) -> int:
        """The first one's."""
        return int(self.told("agreed")[0])

    def here(self) -> None:
        """It has done what the first one waits for."""
        self._connection.send(HERE)

    def told(self, kind: str = "") -> Any:
        """What is to be done; of the kind."""
        what, *rest = pickle.loads(self._connection.recv_bytes())
        assert kind in ("", what)
        return rest if kind else (what, *rest)


def serve(ranks: Further, prepared: Prepared) -> None:
    """Steps, and adapters, until the first rank closes the connection."""
    own, echo = prepared.own, Echo(prepared.own.cache)
    adapters: dict[int, Adapter] = {}
    with alone() if prepared.own_threads else nullcontext():
        while True:
            what, *rest = ranks.told()
            if what == "adapter":
                name, directory, number = rest
                adapters[number] = own.adapters.read(name, directory, number)
                ranks.here()
                continue
            calls, forgotten, way, pieces = rest
            echo.make(calls)
            for number in forgotten:
                del adapters[number]
            told = [
                Piece(Stretch(sequence, start, len(tokens)), tokens, wanted, None if number is None else adapters[number], scored=scored)
                for sequence, start, tokens, wanted, scored, number in pieces
            ]
            own.runner.run(told, way=way)


def main() -> NoReturn:
    """From beginning to end."""
    connection, files = joined()
    ended(connection, partial(_run, connection, mmap.mmap(files[0], 0) if files else None))


def _run(connection: Connection[Any, Any], memory: mmap.mmap | None) -> None:
    load_plugins(connection.recv())  # without which a recipe cannot be read
    start: Start = connection.recv()
    torch.set_num_threads(start.threads)
    if memory is None:
        connection.send(HERE)
    with made_current(device_of(start.recipe.inference.device, start.rank)):
        ranks = Further(start, connection, memory)
        serve(ranks, prepare(start.path, start.recipe, start.adapter, lambda told: None, ranks=ranks))
