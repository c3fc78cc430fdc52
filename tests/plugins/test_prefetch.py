"""Activations brought back ahead: in which order, how many at a time, and the same bits however backward is called."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fw.errors import RunError
from fw.meter.allocations import allocations
from fw_plugins.offload import disk_store
from fw_plugins.offload.activations import offload
from fw_plugins.offload.disk_store import DiskStore, Reader
from fw_plugins.offload.host_store import HostStore, OnHost
from fw_plugins.offload.prefetch import Fetch, Stored

BLOCKS, WIDTH = 5, 16


class Block(nn.Module):
    """Saves its input twice (two products) and four tensors in all; no two blocks' inputs are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(self.a(x).tanh() * self.b(x).sigmoid())


def stack(store: Callable[[Tensor], Stored | None] | None = None, ahead: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if store is not None:
        offload(made, store, 1, ahead)
    return made


def inputs(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


def plain() -> list[Tensor]:
    model = stack()
    model(inputs(0)).square().sum().backward()
    return gradients(model)


class Noted(Stored):
    """A clone, and notes of what happens to it."""

    def __init__(self, notes: Notes, number: int, tensor: Tensor) -> None:
        self.notes, self.number, self.values = notes, number, tensor.clone()

    def settle(self) -> None:
        self.notes.settled.append(self.number)

    def fetch(self) -> Fetch:
        self.notes.begun.append(self.number)
        return NotedFetch(self)


class NotedFetch(Fetch):
    def __init__(self, stored: Noted) -> None:
        self._stored, self._values = stored, stored.values.clone()
        stored.notes.here[stored.number] = weakref.ref(self)

    def result(self) -> Tensor:
        notes = self._stored.notes
        notes.asked.append(self._stored.number)
        notes.at_first_asking.setdefault(self._stored.number, list(notes.begun))
        notes.most_here = max(notes.most_here, sum(ref() is not None for ref in notes.here.values()))
        return self._values

    def cancel(self) -> None:
        pass


class Notes:
    """Tensors are known by the order in which they were stored, which is that of the blocks: ``each`` of them per block."""

    def __init__(self) -> None:
        self.stored = 0
        self.begun: list[int] = []
        self.asked: list[int] = []
        self.settled: list[int] = []
        self.at_first_asking: dict[int, list[int]] = {}
        self.here: dict[int, weakref.ref[NotedFetch]] = {}
        self.most_here = 0

    def __call__(self, tensor: Tensor) -> Stored:
        self.stored += 1
        return Noted(self, self.stored - 1, tensor)

    @property
    def each(self) -> int:
        return self.stored // BLOCKS


@pytest.mark.parametrize("ahead", [1, 2, 9])
def test_what_was_stored_last_comes_back_first_and_ahead(ahead):
    notes = Notes()
    model = stack(notes, ahead)
    model(inputs(0)).square().sum().backward()
    assert same(gradients(model), plain())
    each = notes.each
    assert notes.stored == BLOCKS * each and each >= 3
    assert notes.begun == list(reversed(range(notes.stored))), "each once, and in the reverse order"
    for block in range(BLOCKS):
        first = next(n for n in notes.asked if n // each == block)
        begun = {n // each for n in notes.at_first_asking[first]}
        assert begun == set(range(max(0, block - ahead), BLOCKS)), "this block and those ahead, and no more"
    assert notes.most_here <= (ahead + 1) * each


def test_without_prefetch_each_comes_when_it_is_asked_for():
    notes = Notes()
    model = stack(notes, 0)
    model(inputs(0)).square().sum().backward()
    assert same(gradients(model), plain())
    assert len(notes.begun) == len(set(notes.begun)) == len(notes.at_first_asking)
    assert all(begun[-1] == number for number, begun in notes.at_first_asking.items())
    assert len(notes.asked) > len(notes.begun), "what two operations have saved comes once"


def test_tensors_of_no_more_than_two_blocks_wait_to_be_copied_away():
    notes = Notes()
    model = stack(notes)
    out = model(inputs(0))
    assert set(notes.settled) == set(range((BLOCKS - 2) * notes.each)), "the last two have not been asked to"
    out.sum().backward()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_however_backward_is_called(tmp_path, ahead):
    """Twice over one graph, for some inputs only, two graphs at once and in either order, a graph that is dropped, validation between."""
    results = []
    for store in (None, DiskStore(tmp_path)):
        model, found = stack(store, ahead), []
        x = inputs(0)
        out = model(x).square().sum()
        out.backward(retain_graph=True)
        found += gradients(model)
        found += torch.autograd.grad(out, [model[3].a.weight], retain_graph=True)
        out.backward()
        found += gradients(model)
        first, second = model(inputs(1)).sum(), model(inputs(2)).square().sum()
        model(inputs(3))
        with torch.no_grad():
            found.append(model(inputs(4)))
        first.backward()
        second.backward()
        found += gradients(model)
        for seed in (5, 6):  # accumulated
            model(inputs(seed)).square().sum().backward()
        found += gradients(model)
        results.append(found)
    assert same(*results)


def left(directory: Path) -> list[str]:
    """Files of a directory that this process has open."""
    gc.collect()
    return [name for fd in os.listdir("/proc/self/fd") if str(directory) in (name := os.path.realpath(f"/proc/self/fd/{fd}"))]


def readers() -> list[threading.Thread]:
    """Threads that still read, after they have had the time to end."""
    found = [thread for thread in threading.enumerate() if thread.name == "fw activations"]
    for thread in found:
        thread.join(60)
    return [thread for thread in found if thread.is_alive()]


def test_a_graph_that_is_dropped_leaves_nothing(tmp_path):
    model = stack(DiskStore(tmp_path))
    out = model(inputs(0))
    assert len(left(tmp_path)) >= 3 * BLOCKS
    del out
    assert not left(tmp_path) and not readers()


def test_neither_does_a_graph_whose_operations_keep_small_outputs(tmp_path):
    """What is too small to go is an operation's own output here; in a block, such are the softmax's sums that attention keeps."""

    class Roots(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.square().mean(1, keepdim=True).sqrt()

    model = nn.Sequential(*(Roots() for _ in range(BLOCKS)))
    offload(model, DiskStore(tmp_path), 8 * WIDTH * 4, 1)
    out = model(inputs(0))
    assert left(tmp_path)
    del out
    assert not left(tmp_path) and not readers()


def test_files_go_as_backward_goes(tmp_path):
    model = stack(DiskStore(tmp_path))
    held: list[int] = []
    for place in (model[-1].a.weight, model[1].a.weight):
        place.register_post_accumulate_grad_hook(lambda _: held.append(len(left(tmp_path))))
    out = model(inputs(0)).square().sum()
    all_of_them = len(left(tmp_path))
    out.backward()
    assert held[0] < all_of_them, "of a block too, tensor by tensor"
    assert held[1] <= all_of_them * 2 / BLOCKS and not left(tmp_path) and not readers()


def test_an_error_while_reading_is_the_runs(tmp_path, monkeypatch):
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    model = stack(DiskStore(tmp_path), 2)
    out = model(inputs(0)).sum()
    with monkeypatch.context() as patch:
        patch.setattr(disk_store.os, "preadv", broken)
        with pytest.raises(RunError, match=rf"offload\.path: {tmp_path}: Input/output error while reading activations back"):
            out.backward()
        assert not readers()
    del out
    model.zero_grad()
    model(inputs(0)).square().sum().backward()
    assert same(gradients(model), plain()), "the next step knows nothing of it"
    assert not left(tmp_path), "torch keeps the graph of a backward that failed until the next one"


def test_any_other_error_of_the_thread_is_told_too(tmp_path, monkeypatch):
    def broken(*_: object) -> int:
        raise MemoryError

    model = stack(DiskStore(tmp_path))
    out = model(inputs(0)).sum()
    monkeypatch.setattr(disk_store, "read_whole", broken)
    with pytest.raises(RunError, match="activations could not be read back: MemoryError"):
        out.backward()
    assert not readers()


def test_a_read_may_come_in_pieces_and_must_be_whole(tmp_path, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr(disk_store.os, "preadv", lambda fd, into, at: whole(fd, [into[0][:100]], at))
    tensor = torch.randn(7, 33)
    stored = DiskStore(tmp_path)(tensor)
    assert stored.fetch().result().equal(tensor)
    os.ftruncate(stored._file.fileno(), 500)
    with pytest.raises(RunError, match="a file ends after 500 of 924 bytes while reading"):
        stored.fetch().result()


def test_who_asks_reads_what_the_thread_has_not_begun():
    reader, go_on = Reader(), threading.Event()
    order: list[str] = []

    def notes(name: str) -> Callable[[], None]:
        return lambda: order.append(f"{name} by {threading.current_thread().name}")

    def waits() -> None:
        go_on.wait(60)

    first = reader.begin(waits, lambda: torch.zeros(1))
    second, third, fourth = (reader.begin(notes(name), lambda: torch.ones(1)) for name in ("second", "third", "fourth"))
    assert third.result() is third.result()
    second.cancel()
    go_on.set()
    first.result()
    fourth.result()
    assert order[0] == "third by MainThread" and not any("second" in line for line in order) and len(order) == 2
    assert not readers()


def test_what_comes_back_from_disk_is_seen_by_who_measures_memory(tmp_path):
    tensor = torch.randn(64, 64)
    stored = DiskStore(tmp_path)(tensor)
    with allocations(torch.device("cpu")) as found:
        values = stored.fetch().result()
    assert values.equal(tensor) and found.left_bytes == tensor.nbytes


class SlowLane:
    """Copies nothing before somebody waits for it, in the order of the lane: the latest that a stream may be."""

    def __init__(self) -> None:
        self.queue: list[tuple[SlowCopy, Tensor, Tensor]] = []
        self.copies = 0

    def copy(self, target: Tensor, source: Tensor) -> SlowCopy:
        copy = SlowCopy(self)
        self.queue.append((copy, target, source))
        self.copies += 1
        return copy


class SlowCopy:
    def __init__(self, lane: SlowLane) -> None:
        self._lane, self.is_done = lane, False

    def wait(self) -> None:
        while not self.is_done:
            copy, target, source = self._lane.queue.pop(0)
            target.copy_(source)
            copy.is_done = True


class SlowHostStore(HostStore):
    """A host store whose device is the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.back = SlowLane(), SlowLane()
        self.made: weakref.WeakSet[OnHost] = weakref.WeakSet()

    def __call__(self, tensor: Tensor) -> Stored:
        stored = OnHost(tensor, self)
        self.made.add(stored)
        return stored

    def room(self, tensor: Tensor) -> Tensor:
        return torch.full(tensor.shape, float("nan"), dtype=tensor.dtype)

    def lane(self, direction: str, device: torch.device) -> SlowLane:
        return self.away if direction == "away" else self.back


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_nothing_is_used_before_its_copy_is_done(ahead):
    store = SlowHostStore()
    model = stack(store, ahead)
    out = model(inputs(0)).square().sum()
    each = store.away.copies // BLOCKS
    assert len(store.away.queue) == 2 * each, "the copies of all but two blocks have been waited for"
    out.backward(retain_graph=True)
    assert same(gradients(model), plain())
    assert 0 < store.back.copies <= (BLOCKS - 2) * each, "what had not gone yet has not come back"
    out.backward()
    assert same(gradients(model), plain())
    del out
    gc.collect()
    assert not store.made and not store.away.queue and not store.back.queue, "no memory is freed amid a copy"


def test_a_graph_that_is_dropped_waits_for_its_copies():
    store = SlowHostStore()
    out = stack(store)(inputs(0))
    assert store.away.queue
    del out
    gc.collect()
    assert not store.made and not store.away.queue


@pytest.mark.parametrize("settles", [False, True])
def test_what_is_overwritten_while_it_is_copied_is_told(settles):
    store = SlowHostStore()
    tensor = torch.ones(3)
    stored = store(tensor)
    tensor.mul_(2)
    if settles:
        stored.settle()
    with pytest.raises(RunError, match="overwrites what it has saved for backward"):
        stored.fetch().result()


@pytest.mark.parametrize("cut", [lambda t: t, lambda t: t[:, 3:7], lambda t: t.t(), lambda t: t[::2]])
def test_what_comes_back_is_laid_out_as_it_was(tmp_path, cut):
    """Gaps included: compiled code has asserted the strides of what it saves."""
    tensor = cut(torch.randn(6, 24))
    for store in (DiskStore(tmp_path), SlowHostStore()):
        stored = store(tensor)
        stored.settle()
        back = stored.fetch().result()
        assert back.equal(tensor) and back.stride() == tensor.stride() and back.data_ptr() != tensor.data_ptr()


def test_host_memory_stays_where_it_is():
    assert HostStore()(torch.ones(3)) is None
