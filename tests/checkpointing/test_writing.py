"""Pieces on several ranks become the files that one process would write, whoever keeps what."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fw.checkpointing.manifest import hash_file
from fw.checkpointing.pieces import Layout
from fw.checkpointing.ranges import RangeFile
from fw.checkpointing.staging import Stage
from fw.checkpointing.tensor_files import TensorFiles
from fw.checkpointing.writing import Writing, distinct
from fw.kinds.checkpoint import Kept, Part, Piece, Region, Snapshot
from fw.kinds.model import HFTensor
from fw.place import place
from thread_ranks import Quiet, ThreadRanks, on_ranks


class Given(Kept):
    """A whole of which a rank has a region."""

    def __init__(self, whole: Tensor, where: Region | None) -> None:
        self.shape, self.dtype = whole.shape, whole.dtype
        self.whole, self.where = whole, where

    def piece(self) -> Piece | None:
        if self.where is None:
            return None
        flat = isinstance(self.where, slice)
        return Piece(self.where, lambda: self.whole.reshape(-1)[self.where].clone() if flat else self.whole[self.where])


PROJECTIONS = {"gate": (0, 2), "up": (2, 6)}


def divide(shape: torch.Size, ranks: int, chance: random.Random) -> list[Region | None]:
    """Who has what of a tensor: one of the ways in which shardings divide, with empty and repeated pieces."""
    everything = tuple(slice(0, size) for size in shape)
    way = chance.choice(["same", "flat", "rows", "columns", "grid"])
    if way == "same" or not shape or math.prod(shape) == 0:
        return [everything] * ranks
    if way == "flat":
        cuts = sorted(chance.randint(0, math.prod(shape)) for _ in range(ranks - 1))
        ends = [0, *cuts, math.prod(shape)]
        return [slice(a, b) if a < b else None for a, b in zip(ends, ends[1:], strict=False)]
    dims = {"rows": [0], "columns": [len(shape) - 1], "grid": [0, len(shape) - 1]}[way]
    sizes = [ranks] if len(dims) == 1 else [2, ranks // 2]
    if way == "grid" and (ranks % 2 or len(shape) < 2):
        dims, sizes = [0], [ranks]
    found: list[Region | None] = []
    for rank in range(ranks):
        where, left = list(everything), rank
        for dim, size in zip(dims, sizes, strict=True):
            share = -(-shape[dim] // size)
            start = min((left % size) * share, shape[dim])
            where[dim] = slice(start, min(start + share, shape[dim]))
            left //= size
        found.append(tuple(where) if all(s.stop > s.start for s in where) else None)
    return found


def state(seed: int) -> dict[str, tuple[Tensor, list[HFTensor]]]:
    """Parameters and what files hold of them: whole ones, a stack of experts, gate and up in one, transposed ones, scalars."""
    own = torch.Generator().manual_seed(seed)  # threads draw from the default one at the same time
    codes = torch.randint(0, 255, (11, 4), dtype=torch.uint8, generator=own)  # an 8-bit optimizer's
    return {
        "embed": (torch.randn(13, 8, generator=own), [HFTensor("embed")]),
        "norm": (torch.randn(8, generator=own, dtype=torch.bfloat16), [HFTensor("norm")]),
        "conv": (torch.randn(6, 10, generator=own), [HFTensor("conv", transposed=True)]),
        "experts": (
            torch.randn(4, 6, 5, generator=own),
            [HFTensor(f"experts.{i}.{n}", i, rows) for i in range(4) for n, rows in (("gate", (0, 2)), ("up", (2, 6)))],
        ),
        "codes": (codes, [HFTensor("codes")]),
        "step": (torch.tensor(7.0), [HFTensor("step")]),
        "flag": (torch.tensor([True, False, True]), [HFTensor("flag")]),
        "empty": (torch.empty(0, 3), [HFTensor("empty")]),
    }


def groups(seed: int, kept: Callable[[str, Tensor], Tensor | Kept]) -> dict[str, dict[str, Part]]:
    tensors = {name: (kept(name, whole), stored) for name, (whole, stored) in state(seed).items()}
    parts = {of.name: Part(tensor, of) for tensor, stored in tensors.values() for of in stored}
    names = list(parts)
    return {"model": {n: parts[n] for n in names[:9]}, "optimizer": {n: parts[n] for n in names[9:]}}


def expected(seed: int) -> dict[str, Tensor]:
    return {of.name: Part(whole, of).whole(whole).contiguous() for whole, stored in state(seed).values() for of in stored}


@pytest.mark.parametrize("staged", [False, True], ids=["as it is", "staged"])
@pytest.mark.parametrize(("ranks", "max_bytes"), [(1, 10**9), (1, 200), (2, 10**9), (3, 100), (4, 1), (5, 300)])
def test_files_do_not_depend_on_who_keeps_what(tmp_path, ranks, max_bytes, staged):
    chance = random.Random(ranks * 1000 + max_bytes)
    where = {name: divide(whole.shape, ranks, chance) for name, (whole, _) in state(ranks).items()}

    def save(own: ThreadRanks):
        tensors = groups(ranks, lambda name, whole: Given(whole, where[name][own.rank]))
        if staged:
            stage = Stage(own)
            stage.reserve(tensors)
            for _ in range(2):  # the second time into the same memory
                tensors = dict(stage.plan(tensors).run(Snapshot(1, tensors, {}, {}, lambda path: None)).tensors)
        layout = Layout(own)
        layout.update(distinct(tensors))
        writing = Writing(tensors, layout, own, max_bytes)
        digests = writing.run(place(tmp_path), Quiet())
        for name, data in writing.indices().items():
            place(tmp_path).write(name, data)
        return digests

    results = on_ranks(ranks, save)
    digests = {name: digest for found in results for name, digest in found.items()}
    assert sum(len(found) for found in results) == len(digests) == len(list(tmp_path.glob("*.safetensors")))
    found = {}
    for file, digest in digests.items():
        assert digest == hash_file(place(tmp_path), file)
        found |= load_file(tmp_path / file)
    assert set(found) == set(expected(ranks))
    for name, tensor in expected(ranks).items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
    assert set(TensorFiles(place(tmp_path), "model").where) | set(TensorFiles(place(tmp_path), "optimizer").where) == set(found)


def test_what_is_staged_does_not_follow_the_original():
    def save(own: ThreadRanks):
        tensors = groups(1, lambda name, whole: whole)
        copy = Stage(own).plan(tensors).run(Snapshot(1, tensors, {}, {}, lambda path: None)).tensors
        before = {name: part.tensor.clone() for name, part in tensors["model"].items()}
        for part in tensors["model"].values():
            part.tensor.zero_()
        return [torch.equal(copy["model"][name].tensor.piece().read(), tensor) for name, tensor in before.items()]

    (result,) = on_ranks(1, save)
    assert result and all(result)


def test_ranks_that_keep_the_same_stage_it_once_between_them():
    def staged(own: ThreadRanks):
        return Stage(own).reserve(groups(1, lambda name, whole: Given(whole, tuple(slice(0, n) for n in whole.shape))))

    alone, shared = on_ranks(1, staged), on_ranks(4, staged)
    assert sum(shared) == alone[0] and max(shared) < alone[0]


class Breaks(Given):
    def piece(self) -> Piece | None:
        found = super().piece()
        return None if found is None else Piece(found.where, self._fail)

    def _fail(self) -> Tensor:
        raise OSError(5, "the disk under this tensor is gone")


@pytest.mark.parametrize("how", ["no directory", "a piece that cannot be read"])
def test_a_rank_that_fails_lets_its_peers_come_to_an_end(tmp_path, how):
    ranks = 3
    where = {name: divide(whole.shape, ranks, random.Random(3)) for name, (whole, _) in state(0).items()}
    where["embed"] = [(slice(0, 5), slice(0, 8)), (slice(5, 9), slice(0, 8)), (slice(9, 13), slice(0, 8))]

    def save(own: ThreadRanks):
        fails = own.rank == 1
        kind = Breaks if fails and how != "no directory" else Given
        tensors = groups(0, lambda name, whole: (kind if name == "embed" else Given)(whole, where[name][own.rank]))
        layout = Layout(own)
        layout.update(distinct(tensors))
        directory = tmp_path / "file" / "x" if fails and how == "no directory" else tmp_path
        return Writing(tensors, layout, own, 100).run(place(directory), Quiet())

    (tmp_path / "file").write_text("no directory can be made in a file")
    results = on_ranks(ranks, save)
    assert isinstance(results[1], OSError) and not any(isinstance(results[rank], Exception) for rank in (0, 2))


def test_ranges_are_read_as_mapped_files_are(tmp_path):
    wholes = {name: whole for name, whole in expected(5).items() if whole.dim()}
    from safetensors.torch import save_file

    save_file({**wholes, "step": torch.tensor(7.0)}, tmp_path / "model.safetensors")
    memory = place(f"memory://{tmp_path.name}")
    memory.write("model.safetensors", (tmp_path / "model.safetensors").read_bytes())
    files = TensorFiles(memory)
    file = RangeFile(memory, "model.safetensors")
    assert files.whole("step") == 7
    for name, whole in wholes.items():
        assert files.whole(name).equal(whole) and files.shape(name) == tuple(whole.shape) and files.dtype(name) == whole.dtype
        for cut in ((slice(1, 3),), (slice(0, 1), slice(1, 3)), (slice(2, 2),)):
            if whole.dim() >= len(cut):
                assert file.get_slice(name)[cut].equal(whole[cut]), (name, cut)


def test_only_the_rows_asked_for_are_read(tmp_path, monkeypatch):
    memory = place(f"memory://{tmp_path.name}")
    from safetensors.torch import save

    memory.write("model.safetensors", save({"a": torch.randn(100, 50), "b": torch.randn(100, 50)}))
    file = RangeFile(memory, "model.safetensors")
    read = []
    original = type(memory).read

    def counted(self: object, name: str, start: int, end: int) -> bytes:
        read.append(end - start)
        return original(self, name, start, end)

    monkeypatch.setattr(type(memory), "read", counted)
    file.get_slice("b")[(slice(10, 20), slice(0, 5))]
    assert read == [10 * 50 * 4]


def test_damaged_headers_are_refused_in_a_sentence(tmp_path: Path):
    from safetensors.torch import save

    from fw.errors import UserError

    memory = place(f"memory://{tmp_path.name}")
    data = save({"a": torch.randn(10)})
    for broken in (b"", data[:5], b"\xff" * 16 + data[16:], data[:8] + b"{" * 30 + data[38:], data[:-8]):
        memory.write("model.safetensors", broken)
        with pytest.raises(UserError, match="is no whole safetensors file"):
            TensorFiles(memory)
