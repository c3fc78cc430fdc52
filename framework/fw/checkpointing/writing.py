"""Tensors of many ranks into files of a few: each file is one rank's to write, and comes to it one tensor at a time."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from fw.checkpointing.manifest import Digest
from fw.checkpointing.pieces import Layout, Share, assemble, cut, kept
from fw.checkpointing.stream import SafetensorsWriter, index, size_bytes, split
from fw.kinds.checkpoint import Beat, Kept, Part, Ranks
from fw.place import Place

T = TypeVar("T")
LANES = 2
"""Files that a rank writes at the same time: hashing one of them takes a core."""


@dataclass(frozen=True)
class _Turn:
    """A tensor of a file, and whose turn it is to write it.

    Attributes:
        number: among all turns, the same on all ranks.
        tensor: number of what it is part of, in the layout.
    """

    number: int
    name: str
    part: Part
    tensor: int
    writer: int


def distinct(tensors: Mapping[str, Mapping[str, Part]]) -> list[Kept]:
    """The tensors that all parts are of, each once, in order."""
    found: dict[int, Tensor | Kept] = {}
    for group in tensors.values():
        found |= {id(part.tensor): part.tensor for part in group.values()}
    return [kept(tensor) for tensor in found.values()]


def split_groups(tensors: Mapping[str, Mapping[str, Part]], max_bytes: int) -> dict[str, tuple[str, list[str]]]:
    """Files, each with its group and the names of its tensors."""
    return {file: (stem, names) for stem, group in tensors.items() for file, names in split(group, stem, max_bytes).items()}


def dealt(
    tensors: Mapping[str, Mapping[str, Part]], files: Mapping[str, tuple[str, Sequence[str]]], ranks: int
) -> Iterator[tuple[str, int]]:
    """Files and the lanes that write them, the largest first to whom has least. Lane ``n`` is rank ``n % ranks``'s."""
    sizes = {file: sum(size_bytes(tensors[stem][n]) for n in names) for file, (stem, names) in files.items()}
    load = [(0, lane) for lane in range(ranks * LANES)]
    for file in sorted(sizes, key=lambda file: -sizes[file]):
        least, lane = load[0]
        heapq.heapreplace(load, (least + sizes[file] + 1, lane))
        yield file, lane


class Writing:
    """One save of all groups of tensors.

    Args:
        layout: updated for :func:`distinct` of the same tensors.
        max_bytes: of a file.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Part]], layout: Layout, ranks: Ranks, max_bytes: int) -> None:
        self._tensors, self._layout, self._ranks = tensors, layout, ranks
        self._files = split_groups(tensors, max_bytes)
        self._lanes = self._assign()

    def _assign(self) -> list[list[tuple[str, list[_Turn]]]]:
        """A lane's files in the order in which it writes them."""
        numbers: dict[int, int] = {}
        for group in self._tensors.values():
            for part in group.values():
                numbers.setdefault(id(part.tensor), len(numbers))
        lanes: list[list[tuple[str, list[_Turn]]]] = [[] for _ in range(self._ranks.size * LANES)]
        turn = 0
        for file, lane in dealt(self._tensors, self._files, self._ranks.size):
            stem, names = self._files[file]
            turns = []
            for name in names:
                part = self._tensors[stem][name]
                turns.append(_Turn(turn, name, part, numbers[id(part.tensor)], lane % self._ranks.size))
                turn += 1
            lanes[lane].append((file, turns))
        return lanes

    def indices(self) -> dict[str, bytes]:
        """``<stem>.safetensors.index.json`` of the groups that fill several files, by name."""
        found = {}
        for stem, group in self._tensors.items():
            files = {file: names for file, (of, names) in self._files.items() if of == stem}
            if len(files) > 1:
                found[f"{stem}.safetensors.index.json"] = (json.dumps(index(files, group), indent=1) + "\n").encode()
        return found

    def run(self, directory: Place, beat: Beat) -> dict[str, Digest]:
        """Write this rank's files and give the other ranks what they need for theirs.

        Where something fails here, peers still get what they wait for, so that the end of the save reaches all of them.

        Raises:
            OSError: of the first file that could not be written.
        """
        rank, size = self._ranks.rank, self._ranks.size
        own = [lane for number, lane in enumerate(self._lanes) if number % size == rank and lane]
        with ThreadPoolExecutor(LANES + 1, thread_name_prefix="save") as pool:
            jobs: list[Future[dict[str, Digest]]] = [pool.submit(self._write, directory, lane, beat) for lane in own]
            sending = pool.submit(self._give, beat) if size > 1 else None
            digests: dict[str, Digest] = {}
            failure: BaseException | None = None
            for job in jobs:
                try:
                    digests |= job.result()
                except BaseException as error:
                    failure = failure or error
            if sending is not None:
                try:
                    sending.result()
                except BaseException as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        return digests

    def _write(self, directory: Place, lane: Sequence[tuple[str, list[_Turn]]], beat: Beat) -> dict[str, Digest]:
        digests: dict[str, Digest] = {}
        attempt, pieces = _UntilFailure(beat), _Pieces()

        def wrote(count: int) -> None:
            beat(size=count)

        for file, turns in lane:
            beat(f"writing {file}")
            writer = attempt(SafetensorsWriter, directory, file, {turn.name: turn.part for turn in turns}, wrote)
            for turn in turns:
                whole = self._whole(turn, pieces, attempt)
                if writer is not None and whole is not None:
                    attempt(writer.write, whole)
                beat()
            if writer is not None:
                digest = attempt(writer.close)
                if digest is not None:
                    digests[file] = digest
                else:
                    writer.abort()
        if attempt.failure is not None:
            raise attempt.failure
        return digests

    def _whole(self, turn: _Turn, pieces: _Pieces, attempt: _UntilFailure) -> Tensor | None:
        """The tensor of the file; None where this rank's piece could not be read, though what others send is taken all the same."""
        shares = self._layout.shares(turn.tensor, turn.part, turn.writer)
        others = [share for share in shares if share.rank != self._ranks.rank]
        if len(others) == len(shares):
            return self._assemble(turn, shares, None)
        own = attempt(pieces.read, turn.part)
        whole = self._assemble(turn, shares if own is not None else others, own)
        return whole if own is not None else None

    def _assemble(self, turn: _Turn, shares: Sequence[Share], own: Tensor | None) -> Tensor:
        def receive(tensor: Tensor, share: Share) -> None:
            self._ranks.receive(_bytes(tensor), share.rank, turn.number)

        return assemble(turn.part, shares, self._ranks.rank, own, receive)

    def _give(self, beat: Beat) -> None:
        """Send what other ranks write, in the one order in which all lanes of all ranks can come on."""
        failure: Exception | None = None
        pieces = _Pieces()
        for turn in self._in_order():
            if turn.writer == self._ranks.rank:
                continue
            for share in self._layout.shares(turn.tensor, turn.part, turn.writer):
                if share.rank != self._ranks.rank:
                    continue
                try:
                    # A copy where it would be a view: what is sent must be contiguous, and on the host.
                    values = cut(pieces.read(turn.part), share.there).to("cpu").contiguous()
                except Exception as error:
                    failure = failure or error
                    here = share.here
                    shape = (here.stop - here.start,) if isinstance(here, slice) else tuple(s.stop - s.start for s in here)
                    values = torch.zeros(shape, dtype=turn.part.dtype)
                self._ranks.send(_bytes(values), turn.writer, turn.number)
                beat()
        if failure is not None:
            raise failure

    def _in_order(self) -> Iterator[_Turn]:
        """All turns, those of a lane in its order, lanes side by side by the bytes each has written.

        Every rank sends in this order, and no lane takes its tensors in another one: of the turns that are not over, the first is
        always waited for by its writer and next for its senders, so that none can wait for ever.
        """
        keyed: list[tuple[int, int, int, _Turn]] = []
        for number, lane in enumerate(self._lanes):
            position = 0
            for _, turns in lane:
                for turn in turns:
                    keyed.append((position, number, len(keyed), turn))
                    position += size_bytes(turn.part)
        return (turn for *_, turn in sorted(keyed, key=lambda entry: entry[:3]))


class _UntilFailure:
    """Does what may fail, until something does; from then on, and once a peer has failed, nothing."""

    def __init__(self, beat: Beat) -> None:
        self.failure: Exception | None = None
        self._beat = beat

    def __call__(self, step: Callable[..., T], *arguments: Any) -> T | None:
        """What the step gives; None where it fails, or is not tried."""
        if self.failure is None and not self._beat.failed:
            try:
                return step(*arguments)
            except Exception as error:
                self.failure = error
        return None


class _Pieces:
    """This rank's piece of the tensor that was last asked for: the experts of a stack follow one another."""

    def __init__(self) -> None:
        self._of: Tensor | Kept | None = None
        self._values: Tensor | None = None

    def read(self, part: Part) -> Tensor:
        if self._values is None or self._of is not part.tensor:
            piece = kept(part.tensor).piece()
            assert piece is not None, "the layout says that there is one"
            self._of, self._values = part.tensor, piece.read()
        return self._values


def _bytes(tensor: Tensor) -> Tensor:
    """As gloo sends any dtype."""
    return tensor.reshape(-1).view(torch.uint8)
