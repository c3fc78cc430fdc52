"""Products of whole matrices by AMX, against products in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fw.kernels import matrix
from fw.kernels.build import with_threads
from kernels.flags import with_tiles

SHAPES = [(1, 1, 1), (33, 51, 70), (64, 512, 256), (100, 2050, 96), (300, 4999, 40)]


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    with_tiles(monkeypatch, matrix, "_PRODUCT")


def factors(rows, inner, columns, *, a_turned, b_turned, dtype):
    generator = torch.Generator().manual_seed(rows + inner + columns)
    a, b = torch.randn(rows, inner, generator=generator).bfloat16(), torch.randn(inner, columns, generator=generator).to(dtype)
    return a.t().contiguous().t() if a_turned else a, b.t().contiguous().t() if b_turned else b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_in_fp64(shape, a_turned, b_turned, dtype):
    a, b = factors(*shape, a_turned=a_turned, b_turned=b_turned, dtype=dtype)
    wanted = a.double() @ b.bfloat16().double()
    assert matrix.takes(a, b, torch.float32)
    torch.testing.assert_close(matrix.product(a, b, torch.float32).double(), wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-5)
    start = torch.randn(shape[0], shape[2] + 3)[:, : shape[2]]
    for to_nothing, begin in ((False, start.double()), (True, torch.zeros(()))):
        total = torch.empty(shape[0], shape[2] + 3)[:, : shape[2]].copy_(start)
        matrix.add_product(total, a, b, to_nothing=to_nothing)
        torch.testing.assert_close(total.double(), begin + wanted, atol=1e-5 * wanted.abs().max().item(), rtol=1e-5)
    if shape[1] <= 2048:
        assert torch.equal(matrix.product(a, b, torch.bfloat16), matrix.product(a, b, torch.float32).bfloat16())
    else:
        assert not matrix.takes(a, b, torch.bfloat16)  # whose sums would be rounded on the way


def test_results_that_go_past_the_caches_are_the_same():
    a, b = factors(160, 64, 60_000, a_turned=False, b_turned=True, dtype=torch.float32)
    for dtype in (torch.float32, torch.bfloat16):  # 38 and 19 MB
        whole = matrix.product(a, b, dtype)
        parts = torch.cat([matrix.product(a, part, dtype) for part in b.split(30_000, dim=1)[:1]], 1)
        assert torch.equal(whole[:, :30_000], parts)


def test_a_sum_in_bfloat16_is_rounded_once():
    a, b = factors(40, 96, 50, a_turned=True, b_turned=False, dtype=torch.bfloat16)
    total = torch.randn(40, 50).bfloat16()
    wanted = (total.float() + matrix.product(a, b, torch.float32)).bfloat16()
    matrix.add_product(total, a, b)
    assert torch.equal(total, wanted)


def test_what_is_beside_a_matrix_is_left_alone():
    room = torch.full((37, 100), 7.0)
    a, b = factors(33, 40, 45, a_turned=False, b_turned=False, dtype=torch.bfloat16)
    matrix.add_product(room[2:35, 10:55], a, b, to_nothing=True)
    room[2:35, 10:55] = 7
    assert (room == 7).all()


@pytest.mark.parametrize("shape", [(700, 300, 500), (40, 3000, 5000)])
def test_numbers_of_threads_do_not_show(shape):
    a, b = factors(*shape, a_turned=True, b_turned=False, dtype=torch.float32)
    found = []
    for threads in (1, 2, 5, 16):
        with with_threads(threads):
            found.append(matrix.product(a, b, torch.float32))
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_factors_that_torch_multiplies():
    a, b = factors(8, 16, 8, a_turned=False, b_turned=False, dtype=torch.bfloat16)
    assert not matrix.takes(a.float(), b, torch.float32)
    assert not matrix.takes(a, b.double(), torch.float32)
    assert not matrix.takes(a[:, ::2], b[::2], torch.float32)
    assert not matrix.takes(a[:0], b, torch.float32)


def test_operations_are_counted():
    a, b = factors(8, 16, 32, a_turned=False, b_turned=False, dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counted:
        matrix.add_product(matrix.product(a, b, torch.float32), a, b)
    assert counted.get_total_flops() == 2 * 2 * 8 * 16 * 32
