"""A process with a part of a model's layers: does what the first rank says, until that is gone."""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import sys
import threading
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from fw.errors import UserError, describe
from fw.inference.adapters import Adapter
from fw.inference.cached import Piece
from fw.inference.divided import Several
from fw.inference.mirrored import Echo
from fw.inference.prepare import Prepared, device_of, prepare
from fw.inference.ranks import HERE, OPTION, Start
from fw.kernels.threads import alone
from fw.kinds.kv_cache import Stretch


class Further(Several):
    """One that is told."""

    def __init__(self, start: Start, connection: Connection[Any, Any], memory: mmap.mmap | None) -> None:
        self._connection = connection
        device = device_of(start.recipe.inference.device, start.rank)
        super().__init__(start.rank, start.ranks, OPTION, start.joined(memory, device))

    def agreed(self, value: int) -> int:
        """The first one's."""
        return int(self.told("agreed")[0])

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
                continue
            calls, forgotten, pieces = rest
            echo.make(calls)
            for number in forgotten:
                del adapters[number]
            own.runner.run(
                [
                    Piece(Stretch(sequence, start, len(tokens)), tokens, wanted, None if number is None else adapters[number])
                    for sequence, start, tokens, wanted, number in pieces
                ]
            )


def main() -> NoReturn:
    """From beginning to end. Gloo's threads may abort an interpreter that ends."""
    code = _run()
    sys.stdout.flush()
    os._exit(code)


def _run() -> int:
    """With the numbers of the files that the first rank gives: of the connection, of what closes with it, and of memory or -1."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    files = [int(word) for word in sys.argv[1:]]
    threading.Thread(target=_end_with_the_first, args=(files[1],), daemon=True).start()
    connection: Connection[Any, Any] = Connection(files[0])
    memory = mmap.mmap(files[2], 0) if files[2] >= 0 else None
    try:
        start: Start = connection.recv()
        torch.set_num_threads(start.threads)
        if memory is None:
            connection.send(HERE)
        ranks = Further(start, connection, memory)
        serve(ranks, prepare(start.path, start.recipe, start.adapter, lambda told: None, ranks=ranks))
    except EOFError:
        return 0
    except Exception as error:
        with suppress(OSError):
            connection.send(error if isinstance(error, UserError) else describe(error))
        return 1
    return 0


def _end_with_the_first(file: int) -> None:
    os.read(file, 1)
    os._exit(1)
