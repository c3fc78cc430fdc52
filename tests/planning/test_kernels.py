"""What kernels take for themselves, as planned, against the allocator's events while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from fw.planning import products
from fw.planning.kernels import momentary

ROWS, COLUMNS = 100, 1000
LEAST = 1000


def _tensors() -> dict[str, Tensor]:
    wide = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return {
        "wide": wide,
        "half": wide.bfloat16(),
        "row": wide[0].clone(),
        "mask": wide > 0,
        "ids": (wide.abs() * 10).long().clamp(max=ROWS - 1),
        "short": (wide.abs() * 10).int().clamp(max=ROWS - 1),
        "number": torch.tensor(2.0),
    }


def _chunk_cat(tensors: list[Tensor], number: int, dtype: torch.dtype) -> Tensor:
    """As FSDP brings gradients together, a row per rank."""
    length = sum(-(-tensor.shape[0] // number) * tensor[0].numel() for tensor in tensors)
    out = torch.empty(number, length, dtype=dtype)
    torch.ops.fsdp.chunk_cat(tensors, dim=0, num_chunks=number, out=out)
    return out


CASES: dict[str, Callable[..., Any]] = {
    "the same dtype": lambda wide, **_: wide + wide,
    "a number": lambda half, **_: half * 2,
    "a number in a tensor": lambda half, number, **_: half * number,
    "fp32 + bf16": lambda wide, half, **_: wide + half,
    "fp32 += bf16": lambda wide, half, **_: wide.add_(half),
    "bf16 += fp32": lambda wide, half, **_: half.add_(wide),
    "bf16 * a row of fp32": lambda half, row, **_: half * row,
    "fp32 - 2 bf16": lambda wide, half, **_: torch.sub(wide, half, alpha=2),
    "fp32 * mask": lambda wide, mask, **_: wide * mask,
    "fp32 *= mask": lambda wide, mask, **_: wide.mul_(mask),
    "bf16 /= fp32": lambda wide, half, **_: half.div_(wide),
    "int / int": lambda ids, **_: ids / (ids + 1),
    "fp32 < bf16": lambda wide, half, **_: wide < half,
    "bf16 == int": lambda half, ids, **_: half == ids,
    "maximum": lambda wide, half, **_: torch.maximum(wide, half),
    "power": lambda wide, half, **_: wide.abs() ** half,
    "addcmul": lambda wide, half, **_: torch.addcmul(wide, half, half),
    "logical and": lambda wide, mask, **_: torch.logical_and(mask, wide),
    "copy": lambda wide, half, **_: half.copy_(wide),
    "clamp": lambda half, **_: half.clamp(max=1.0),
    "sum": lambda half, **_: half.sum(),
    "sum in fp32": lambda half, **_: half.sum(dtype=torch.float32),
    "sum of rows in fp64": lambda wide, **_: wide.sum(-1, dtype=torch.float64),
    "sum of a mask": lambda mask, **_: mask.sum(),
    "sum of int32": lambda short, **_: short.sum(-1),
    "mean of bf16": lambda half, **_: half.mean(-1),
    "mean of fp32": lambda wide, **_: wide.mean(-1),
    "norm in fp64": lambda wide, **_: torch.linalg.vector_norm(wide, dim=-1, dtype=torch.float64),
    "any": lambda wide, **_: wide.any(),
    "all of a mask": lambda mask, **_: mask.all(),
    "running sum of int32": lambda short, **_: short.cumsum(0),
    "logsumexp": lambda wide, **_: wide.logsumexp(-1),
    "index by int64": lambda row, ids, **_: row[ids],
    "index by int32": lambda row, short, **_: row[short],
    "cat": lambda half, **_: torch.cat([half, half]),
    "cat of bf16 and fp32": lambda wide, half, **_: torch.cat([half, wide]),
    "cat of bf16 into fp32": lambda half, **_: torch.cat([half], out=torch.empty(ROWS, COLUMNS)),
    "chunks": lambda half, **_: _chunk_cat([half], 4, torch.bfloat16),
    "chunks in fp32": lambda half, **_: _chunk_cat([half], 4, torch.float32),
    "chunks of rows that do not divide": lambda wide, row, **_: _chunk_cat([wide, row], 7, torch.float32),
    "chunks of rows that do not divide, in fp32": lambda half, row, **_: _chunk_cat([half, row[:8].bfloat16()], 7, torch.float32),
    "product of bf16": lambda half, **_: half @ half.t(),
    "product of bf16, rows of the other kind": lambda half, **_: half.t() @ half,
    "product of bf16, added": lambda half, **_: torch.addmm(half[0], half[:, :ROWS], half),
    "product of bf16, added in place": lambda half, **_: half.addmm_(half[:, :ROWS], half, beta=0),
    "products of bf16": lambda half, **_: torch.bmm(half.view(10, 10, -1), half.view(10, 10, -1).transpose(1, 2)),
    "product of bf16 with gaps": lambda half, **_: half[:, :500] @ half[:, 500:].t(),
    "product of fp32": lambda wide, **_: wide @ wide.t(),
    "index_select by int32": lambda row, short, **_: row.index_select(0, short.view(-1)),
}


class _Planned(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.blocks += [nbytes for nbytes in momentary(func, args, kwargs or {}, out, torch.get_num_threads()) if nbytes >= LEAST]
        return out


def _measured(work: Callable[[], Any]) -> tuple[list[int], Any]:
    """Blocks that came and went while it ran, and what it gave."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        out = work()
    events: list[tuple[int, int]] = []

    def walk(event: Any) -> None:
        if event.typed[0].name == "Allocation":
            events.append((event.start_time_ns, event.typed[1].alloc_size))
        for child in event.children:
            walk(child)

    for root in recorded.profiler.kineto_results.experimental_event_tree():
        walk(root)
    return [-size for _, size in sorted(events) if size <= -LEAST], out


@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_that_the_allocator_saw(case: str) -> None:
    tensors = _tensors()
    _measured(lambda: CASES[case](**tensors))  # once, for what is made at the first time
    measured, kept = _measured(lambda: CASES[case](**tensors))
    with _Planned() as planned:
        CASES[case](**tensors)
    between = [tensors["ids"].nbytes] if case == "int / int" else [tensors["wide"].nbytes] if case == "power" else []
    assert sorted(planned.blocks + between) == sorted(measured)
    del kept


def test_where_memory_is_short_a_smaller_product_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def measured(a: tuple[tuple[int, ...], ...], b: tuple[tuple[int, ...], ...], dtype: torch.dtype, threads: int) -> int:
        tried.append((a[0], b[0]))
        if a[0][0] > 4096:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."
            )
        return 77

    monkeypatch.setattr(products, "_found_out", measured)
    monkeypatch.setattr(products, "multiplies", lambda dtype: True)
    monkeypatch.setattr(products, "_beside", lambda dtype: None)
    with torch.device("meta"):
        given = [torch.empty(5001, 64, dtype=torch.bfloat16), torch.empty(64, 5003, dtype=torch.bfloat16)]
    assert products.packed(given, torch.bfloat16, 2) == [77]
    assert tried == [((5001, 64), (64, 5003)), ((4096, 64), (64, 4096))]
