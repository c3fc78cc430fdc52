"""Products in fp32 by fw's kernel in place of torch's, against the same in fp64."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fw.kernels import fp32_products
from fw.kernels.build import NotCompiled, library
from fw.kernels.fp32_products import in_place_of_torch, multiplied
from fw.meter.allocations import allocations

SHAPES = ((1, 1, 1), (13, 17, 33), (12, 512, 32), (100, 700, 75), (7, 512, 5000), (261, 1030, 47), (3, 4100, 31), (600, 3, 64))


@pytest.fixture(autouse=True)
def computes(monkeypatch):
    """Whatever processor this is, and however small a product; returns what the kernel was given."""
    if not hasattr(torch.library, "get_kernel"):
        pytest.skip("this torch does not give away an operator's own kernel")
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("no AVX-512")
    try:
        library()
    except NotCompiled as why:
        pytest.skip(str(why))
    monkeypatch.setenv("FW_TRAINING_KERNELS", "on")
    monkeypatch.setattr(fp32_products, "_pays", lambda: True)
    monkeypatch.setattr(fp32_products, "_LEAST", 1)
    monkeypatch.setattr(fp32_products, "_LEAST_SIDE", 1)
    given = []
    compute = fp32_products._compute
    monkeypatch.setattr(fp32_products, "_compute", lambda *x, **how: given.append(x) or compute(*x, **how))
    return given


def close(found, right):
    torch.testing.assert_close(found.double(), right.double(), rtol=0, atol=2e-6 * right.abs().max().item() + 1e-30)


@pytest.mark.parametrize("a_turned", [False, True])
@pytest.mark.parametrize("b_turned", [False, True])
@pytest.mark.parametrize("rows, inner, columns", SHAPES)
def test_products(computes, rows, inner, columns, a_turned, b_turned):
    torch.manual_seed(0)
    a_MK = torch.randn(inner, rows).t() if a_turned else torch.randn(rows, inner)
    b_KN = torch.randn(columns, inner).t() if b_turned else torch.randn(inner, columns)
    x_N, out_MN = torch.randn(columns), torch.full((rows, columns), torch.nan)
    right = a_MK.double() @ b_KN.double()
    with in_place_of_torch():
        close(a_MK @ b_KN, right)
        close(torch.mm(a_MK, b_KN, out=out_MN), right)
        close(torch.addmm(x_N, a_MK, b_KN), right + x_N)
        close(torch.addmm(x_N, a_MK, b_KN, out=out_MN), right + x_N)
        before = out_MN.clone()
        close(torch.addmm(out_MN, a_MK, b_KN, out=out_MN), right + before)
    assert len(computes) == 5
    computes.clear()
    a_MK @ b_KN
    assert not computes


def test_parts_of_larger_matrices():
    torch.manual_seed(0)
    whole = torch.randn(300, 400)
    with in_place_of_torch():
        close(whole[20:90, 30:200] @ whole[100:270, 11:140], whole[20:90, 30:200].double() @ whole[100:270, 11:140].double())
        close(whole[::2] @ whole[::3].t(), whole[::2].double() @ whole[::3].double().t())
        close(whole[20:90].t() @ whole[200:270, 3:], whole[20:90].t().double() @ whole[200:270, 3:].double())


def test_what_is_left_to_torch(computes):
    x = torch.randn(64, 64)
    others = (
        lambda: torch.addmm(x, x, x, beta=0.5),
        lambda: torch.addmm(x, x, x, alpha=2.0),
        lambda: x[::2] @ x[:, ::2],
        lambda: x[:1].expand(64, 64) @ x,
        lambda: x.double() @ x.double(),
        lambda: x.bfloat16() @ x.bfloat16(),
        lambda: torch.mm(x, x, out=torch.empty(64, 64).t()),
        lambda: x[:, :0] @ x[:0],
        lambda: x[:0] @ x,
    )
    right = [other() for other in others]
    with in_place_of_torch():
        for other, same in zip(others, right, strict=True):
            assert torch.equal(other(), same)
        torch.mm(x, x, out=x)  # of which nobody knows the result
        for wrong in (lambda: x @ x[:5], lambda: torch.mm(x, x, out=x.double())):
            with pytest.raises(RuntimeError):
                wrong()
    assert not computes


def test_gradients_and_compiled(computes):
    torch.manual_seed(0)
    given = torch.randn(2, 70, 64), torch.randn(96, 64), torch.randn(96)

    def gradients(dtype, layer):
        x, weight, bias = (one.to(dtype, copy=True).requires_grad_() for one in given)
        y = layer(x, weight, bias)
        y.square().sum().backward()
        return y.detach(), x.grad, weight.grad, bias.grad

    right = gradients(torch.float64, F.linear)
    with in_place_of_torch():
        for layer in (F.linear, torch.compile(F.linear)):
            computes.clear()
            for found, same in zip(gradients(torch.float32, layer), right, strict=True):
                close(found, same)
            assert len(computes) == 3


def test_the_same_on_any_number_of_threads():
    torch.manual_seed(0)
    a, b = torch.randn(1000, 1030), torch.randn(1030, 300)
    before, found = torch.get_num_threads(), []
    with in_place_of_torch():
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(a @ b)
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_it_takes_no_more_of_torch_s_memory():
    x = torch.randn(128, 128)
    with in_place_of_torch(), allocations(torch.device("cpu")) as seen:
        kept = x @ x
    assert seen.peak_bytes == seen.left_bytes == kept.nbytes


def test_it_ends_with_the_last_who_wants_it(computes):
    x = torch.randn(64, 64)
    with in_place_of_torch():
        with in_place_of_torch():
            x @ x
        x @ x
    x @ x
    assert len(computes) == 2


@pytest.mark.parametrize("why", ["asked for", "as fast"])
def test_torch_s_are_kept(monkeypatch, computes, why):
    if why == "asked for":
        monkeypatch.setenv("FW_TRAINING_KERNELS", "off")
    else:
        monkeypatch.setattr(fp32_products, "_pays", lambda: False)
    x = torch.randn(64, 64)
    with in_place_of_torch():
        assert torch.equal(x @ x, multiplied(x, x))
    assert not computes


def test_rates_are_of_what_computes_a_run(computes):
    """A share of more than all there is would be told else."""
    a, b = torch.randn(64, 32), torch.randn(32, 48)
    close(multiplied(a, b), a.double() @ b.double())
    assert len(computes) == 1
    assert torch.equal(multiplied(a.double(), b.double()), a.double() @ b.double()) and len(computes) == 1


def test_few_numbers_and_single_rows_are_torch_s(monkeypatch, computes):
    monkeypatch.undo()
    monkeypatch.setattr(fp32_products, "_pays", lambda: True)
    monkeypatch.setattr(fp32_products, "wanted", lambda: True)
    compute, given = fp32_products._compute, []
    monkeypatch.setattr(fp32_products, "_compute", lambda *x, **how: given.append(x) or compute(*x, **how))
    a, b = torch.randn(256, 4096), torch.randn(4096, 256)
    with in_place_of_torch():
        for some, more in ((a[:3], torch.randn(4096, 4096)), (torch.randn(4096, 4096), b[:, :3].contiguous()), (a[:31], b)):
            assert torch.equal(some @ more, torch.mm(some, more.clone()))
            assert not given
        a @ b
    assert len(given) == 1


def test_what_compiles_a_part_leaves_it_alone(computes):
    @torch.compiler.disable(recursive=False)
    def in_the_middle(x, y):
        return torch.addmm(x, x, y)

    traced = []

    def counting(graph, _):
        traced.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x = torch.randn(64, 64)
    right = x.double() + x.double() @ (x + 1).double()
    with in_place_of_torch():
        close(torch.compile(lambda x: in_the_middle(x, x + 1) * 2, backend=counting)(x), 2 * right)
    assert len(computes) == 1 and len(traced) <= 2, traced


def test_of_whom_it_pays():
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    amd = told["vendor_id"] == "AuthenticAMD" and int(told["cpu family"]) >= 26 and "avx512f" in told["flags"].split()
    assert bool(library().fw_products_of_fp32_pay()) == amd


def test_threads_that_multiply_while_it_begins_and_ends(computes):
    x = torch.randn(64, 64)
    right, ended, wrong = x @ x, threading.Event(), []

    def multiply():
        while not ended.is_set():
            if not torch.allclose(x @ x, right, atol=1e-4):
                wrong.append(x)

    threads = [threading.Thread(target=multiply) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        with in_place_of_torch():
            x @ x
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong
