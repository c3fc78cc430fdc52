"""A rank of test_ranks: ``saving_ranks.py RANK SIZE STORE_FILE SCENARIO``; prints what it got as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from fw.checkpointing.ranks import GlooRanks
from fw.errors import RunError
from fw.kinds.checkpoint import Beat

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
TIMEOUT = 4.0


def fails(beat: Beat) -> None:
    if RANK == 1:
        raise PermissionError(13, "Permission denied", "/some/file")


def fails_while_others_wait_for_it(beat: Beat) -> None:
    if RANK == 1:
        raise MemoryError("no memory for the tensor")
    ranks.receive(torch.empty(4), 1, tag=9)


def hangs(beat: Beat) -> None:
    if RANK == 1:
        beat("writing optimizer-00002")
        threading.Event().wait()


def dies(beat: Beat) -> None:
    if RANK == 1:
        os._exit(3)


def works(beat: Beat) -> int:
    for source in range(SIZE):
        for to in range(SIZE):
            if source != to and source == RANK:
                ranks.send(torch.full((1000,), float(RANK)), to, tag=to)
            elif source != to and to == RANK:
                got = torch.empty(1000)
                ranks.receive(got, source, tag=to)
                assert bool((got == source).all())
            beat()
    return RANK * 10


def outcome(work) -> object:
    try:
        return ranks.together("step 3 not written", work)
    except RunError as error:
        return str(error)


dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=SIZE, timeout=timedelta(seconds=60))
ranks = GlooRanks(timedelta(seconds=TIMEOUT))
said = [outcome(works), outcome(globals()[sys.argv[4]])]
if sys.argv[4] == "fails":
    said.append(outcome(works))  # nobody was lost: the next save can go on
print(json.dumps(said), flush=True)
os._exit(0)
