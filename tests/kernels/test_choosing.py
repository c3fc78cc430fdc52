"""What stands between a head and a token, against torch's operators."""

from __future__ import annotations

import pytest
import torch

from fw.kernels import choosing

available = choosing._LARGEST.available
needs_compiler = pytest.mark.skipif(not available, reason="no C++ compiler")
NAN, INF = float("nan"), float("inf")


@needs_compiler
@pytest.mark.parametrize("size", [1, 5, 16, 17, 48, 1000, 4099])
@pytest.mark.parametrize("values", ["drawn", "few", "minus", "none", "strange"])
def test_the_largest_is_that_of_torch(size: int, values: str) -> None:
    """Of several the first, of rows in which nothing can be chosen too."""
    draw = torch.Generator().manual_seed(size)
    rows = 7
    x_RV = {
        "drawn": torch.randn(rows, size, generator=draw),
        "few": torch.randint(-2, 3, (rows, size), generator=draw).float(),
        "minus": torch.where(torch.rand(rows, size, generator=draw) < 0.5, -INF, -3.0),
        "none": torch.full((rows, size), -INF),
        "strange": torch.where(torch.rand(rows, size, generator=draw) < 0.1, NAN, torch.randn(rows, size, generator=draw)),
    }[values]
    x_RV[3, -1] = INF
    best_R, where_R = choosing.largest(x_RV)
    # By hand: torch's own choice among equal numbers is not documented.
    for row, best, where in zip(x_RV.tolist(), best_R.tolist(), where_R.tolist(), strict=True):
        if any(v != v for v in row):
            assert best != best and where == next(i for i, v in enumerate(row) if v != v)
        else:
            assert best == max(row) and where == row.index(best)
    torch.testing.assert_close(best_R, x_RV.max(-1).values, rtol=0, atol=0, equal_nan=True)


def test_others_are_left_to_torch() -> None:
    x_RV = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    for other in (x_RV.double(), x_RV.t().contiguous().t(), x_RV.bfloat16()):
        best_R, where_R = choosing.largest(other)
        assert torch.equal(best_R, other.max(-1).values) and torch.equal(where_R, other.max(-1).indices)


@needs_compiler
@pytest.mark.parametrize("shape", [(1,), (3, 37), (2, 8192), (5, 3277)])
def test_widened_to_the_bit(shape: tuple[int, ...]) -> None:
    """Every bit pattern there is, among them."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    x = bits.repeat(1 + torch.Size(shape).numel() // len(bits))[: torch.Size(shape).numel()].view(shape).view(torch.bfloat16)
    out = torch.full(shape, 7.0)
    assert choosing.widen(x, out)
    assert torch.equal(out.view(torch.int32), x.view(torch.int16).to(torch.int32) << 16)
    assert not choosing.widen(x.float(), out) and not choosing.widen(x, out.double())
    if x.dim() > 1:
        assert not choosing.widen(x.t(), out.t())
