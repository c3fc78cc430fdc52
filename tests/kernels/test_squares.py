"""Sums of squares against numbers in fp64."""

from __future__ import annotations

import pytest
import torch

from fw.kernels import squares

pytestmark = pytest.mark.skipif(not squares.available(), reason="there is no compiler, and torch's norms are used")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(1,), (15, 16, 17), (33, 5), (1 << 14, (1 << 15) + 3), (0, 7)])
def test_a_sum_is_that_of_every_number_once(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [(torch.randn(size, generator=generator) * 10 ** (number % 3)).to(dtype) for number, size in enumerate(sizes)]
    expected = sum(float(x.double().square().sum()) for x in tensors)
    found = squares.square_sum(tensors)
    assert found.dtype == torch.float64 and float(found) == pytest.approx(expected, rel=1e-13)


def test_it_is_the_same_on_any_number_of_threads() -> None:
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(float(squares.square_sum([x])))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_what_is_not_finite_shows(value: float) -> None:
    x = torch.ones(100)
    x[93] = value
    assert not squares.square_sum([x]).isfinite()
    assert squares.square_sum([torch.full((4,), 1e30)]) == pytest.approx(4e60), "squares that fp32 does not hold"


def test_what_it_takes() -> None:
    x = torch.zeros(4, 6)
    assert squares.takes(x) and squares.takes(x.t()) and squares.takes(x.bfloat16())
    assert not squares.takes(x[:, :3]) and not squares.takes(x.double()) and not squares.takes(x.to("meta"))
