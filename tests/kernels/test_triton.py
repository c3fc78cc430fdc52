"""Kernels for GPUs beside torch's operators; without a GPU in Triton's interpreter, where Triton is installed (`pip install triton`)."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import fw.kernels.gpu_attention as attention  # noqa: E402
import fw.kernels.gpu_elementwise as elementwise  # noqa: E402
from fw_models.layers.norm import RMSNorm, ShiftedRMSNorm  # noqa: E402
from fw_models.layers.rope import Rope, rotate  # noqa: E402
from fw_plugins.kv_cache.keeping import Int4, Int8, Keeping, Plain  # noqa: E402

pytestmark = pytest.mark.gpu if ON_GPU else []
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BF16, FP32 = torch.bfloat16, torch.float32
COMPUTED = BF16 if ON_GPU else FP32
"""In products, of which the interpreter has none in bfloat16."""


def some(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("size", [96, 128, 1000])
@pytest.mark.parametrize("kind", [RMSNorm, ShiftedRMSNorm])
def test_norms(kind: type[RMSNorm], size: int) -> None:
    norm = kind(size, 1e-5).to(DEVICE, BF16).requires_grad_(False)
    norm.weight.copy_(some(size, seed=1))
    x = some(3, 5, size)
    found = elementwise.rms_norm(x, norm.weight, norm.eps, kind is ShiftedRMSNorm)
    torch.testing.assert_close(found, norm(x), rtol=2e-2, atol=1e-2)


def test_rotation_of_heads_that_lie_apart() -> None:
    x_TE = some(7, 5 * 24)
    x_TNH = x_TE[:, 24 : 24 * 4].unflatten(1, (3, 24))
    cos, sin = Rope(24, 10_000.0).angles(torch.arange(7, device=DEVICE)[None] * 31)
    found = elementwise.rotate(x_TNH, cos[0, 0].contiguous(), sin[0, 0].contiguous())
    expected = rotate(x_TNH.float().transpose(0, 1)[None], (cos, sin))[0].transpose(0, 1)
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


def test_gates_of_rows_that_lie_apart() -> None:
    x = some(4, 2 * 1500)
    gate, up = x[:, :1500], x[:, 1500:]
    torch.testing.assert_close(elementwise.silu_mul(gate, up), torch.nn.functional.silu(gate) * up, rtol=2e-2, atol=1e-2)


def kept(keeping: Keeping, count: int, heads: int, size: int, dim: int) -> Tensor:
    """Blocks in which nothing is a number, until it is written."""
    return torch.full((count, heads, size, keeping.row_bytes(dim)), 255, dtype=torch.uint8, device=DEVICE)


def written(keeping: Keeping, tables: list[list[int]], lengths: list[int], heads: int, dim: int, size: int) -> tuple[list[Tensor], ...]:
    """Blocks of keys and values that the kernel wrote, and what is in them of each sequence."""
    blocks = [kept(keeping, 16, heads, size, dim) for _ in range(2)]
    seen: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        slots = torch.tensor([table[at // size] * size + at % size for at in range(length)], device=DEVICE)
        k, v = (some(length, heads, dim, dtype=keeping.dtype, seed=10 * number + which) for which in (1, 2))
        rows = [keeping.encode(x) for x in (k, v)]
        if length:
            elementwise.keep(*(torch.cat([x, x[:1]]) for x in rows), torch.cat([slots, slots[:1] * 0 - 1]), *blocks)
        for one, row in zip(seen, rows, strict=True):
            one.append(keeping.decode(row, dim))
    return blocks, *seen


CASES = {
    "grouped": {},
    "every head its own": {"heads": 2, "kv": 2},
    "window": {"window": 9},
    "window and sinks": {"window": 9, "sinks": 3},
    "window and many sinks": {"window": 9, "sinks": 20},
    "more sinks than are before the window": {"window": 20, "sinks": 19},
    "a prompt, a window and sinks": {"queries": [30, 1, -1, 1], "window": 9, "sinks": 3},
    "capped": {"softcap": 5.0},
    "wide": {"dim": 80},
    "several tokens": {"queries": [3, 1, -1, 4]},
    "a prompt, too": {"queries": [30, 1, -1, 1]},
    "a prompt, and a window": {"queries": [30, 1, -1, 1], "window": 9},
    "fp32": {"keeping": lambda: Plain(FP32)},
    "fp16": {"keeping": lambda: Plain(torch.float16)},
    "int8": {"keeping": lambda: Int8(COMPUTED, 16)},
    "int4": {"keeping": lambda: Int4(COMPUTED, 16)},
    "int4, one group": {"keeping": lambda: Int4(FP32, 24), "dim": 48},
    "int8 of narrow heads": {"keeping": lambda: Int8(COMPUTED, 16), "dim": 12, "keys": 64, "size": 16},
    "int4 of narrow heads": {"keeping": lambda: Int4(COMPUTED, 16), "dim": 12, "keys": 64, "size": 16},
    "one part": {"many": 0},
}


@pytest.mark.parametrize("case", CASES)
def test_attention_to_blocks(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"heads": 6, "kv": 2, "dim": 32, "keeping": lambda: Plain(COMPUTED), "queries": [1, 1, -1, 1], **CASES[case]}
    heads, kv, dim, keeping, queries = given["heads"], given["kv"], given["dim"], given["keeping"](), given["queries"]
    window, sinks, softcap, size = given.get("window"), given.get("sinks", 0), given.get("softcap"), given.get("size", 8)
    monkeypatch.setattr(attention, "_PROGRAMS", given.get("many", 24))
    monkeypatch.setattr(attention, "_KEYS", given.get("keys", 16))
    tables, totals = [[3, 0, 7, 1, 9], [2], [], [15, 14, 6, 4]], [37, 5, 0, 26]
    (keys, values), k, v = written(keeping, tables, totals, kv, dim, size)
    if window is not None:
        first, unseen = -(-sinks // size), max(0, totals[0] - queries[0] - window) // size
        tables[0][first:unseen] = [-1] * (unseen - first)
    padded = torch.tensor([[*table, *[99] * (6 - len(table))] for table in tables], dtype=torch.int32, device=DEVICE)
    rows_of = [max(1, length) for length in queries]
    begins = [sum(rows_of[:number]) for number in range(len(queries))]

    def where(lengths: list[int]) -> attention.Where:
        starts = [total - max(0, length) for total, length in zip(totals, queries, strict=True)]
        given = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (starts, begins, lengths))
        return attention.Where(padded, *given, max(lengths))

    few = where([length if length <= attention.FEW else 0 for length in queries])
    others = where([length if length > attention.FEW else 0 for length in queries])
    q = some(sum(rows_of), heads + 1, dim, dtype=keeping.dtype)[:, 1:]
    rows = keeping.rows(dim)
    assert rows is not None and attention.takes(rows)
    sequences = [few, others] if others.queries else [few]
    found = attention.attend_blocks(q, keys, values, rows, sequences, window=window, sinks=sinks, scale=0.3, softcap=softcap)
    for number, count in enumerate(queries):
        if count < 0:
            assert not found[begins[number]].any()
        for query in range(count):
            row, position = begins[number] + query, totals[number] - count + query
            for head in range(heads):
                of_L = k[number][: position + 1, head // (heads // kv)].double()
                score_L = of_L @ q[row, head].double() * 0.3
                score_L = score_L if softcap is None else softcap * torch.tanh(score_L / softcap)
                if window is not None:
                    at_L = torch.arange(position + 1, device=DEVICE)
                    score_L[(position - at_L >= window) & (at_L >= sinks)] = -math.inf
                expected = score_L.softmax(-1) @ v[number][: position + 1, head // (heads // kv)].double()
                close = 1e-5 if keeping.dtype == FP32 else 2e-2
                torch.testing.assert_close(found[row, head].double(), expected, rtol=close, atol=close)
