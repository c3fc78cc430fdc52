"""Recordings of computations: what is made again is what Python computes, and what cannot be is refused with its reason."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fw.kernels import elementwise, linear
from fw.kernels.tape import NotRepeatable, Recorder

pytestmark = pytest.mark.skipif(not linear.available(), reason="no compiler")


def record(compute, *inputs, lasting=()):
    """The tape and what it gives into."""
    recorder = Recorder(inputs, lasting)
    with torch.inference_mode(), recorder.recording():
        out = compute(*inputs)
    return recorder.tape(out), out


def played(tape, out, inputs, values):
    with torch.inference_mode():
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)
        tape.play()
        return out.clone()


class Net(nn.Module):
    """Kernels of fw's own, operators of torch's, views, copies and changes in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = linear.PackedLinear(nn.Linear(64, 96, dtype=torch.bfloat16))
        self.second = linear.Int8Linear(nn.Linear(96, 64, bias=False, dtype=torch.bfloat16))
        self.plain = nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
        self.weight = nn.Parameter(torch.rand(64).bfloat16(), requires_grad=False)

    def forward(self, x_TD, at_T):
        angles_TD = at_T[:, None].float() * (1 / 100 ** (torch.arange(64) / 64))
        x_TD = x_TD + angles_TD.cos().to(x_TD.dtype)
        for _ in range(3):
            normed_TD = elementwise.rms_norm(x_TD, self.weight, 1e-5)
            y_TD = self.second(F.gelu(self.first(normed_TD)))
            x_TD = x_TD + y_TD
            x_TD = x_TD.view(len(x_TD), 4, 16).transpose(0, 1).reshape(4, -1).mul(0.5).view(4, -1, 16).transpose(0, 1).reshape(-1, 64)
            x_TD += self.plain(x_TD)
        low, high = x_TD.chunk(2, -1)
        return torch.cat([high, F.dropout(low, 0.3, training=False)], -1)[at_T.argsort()].float()


def test_again_with_other_numbers():
    net = Net()
    x_TD, at_T = torch.randn(5, 64).bfloat16(), torch.arange(5)
    lasting = [*net.parameters(), *net.buffers()]
    tape, out = record(net, x_TD, at_T, lasting=lasting)
    for seed in range(3):
        torch.manual_seed(seed)
        values = torch.randn(5, 64).bfloat16(), torch.randint(0, 1000, (5,))
        with torch.inference_mode():
            expected = net(*(value.clone() for value in values))
        gc.collect()
        assert torch.equal(played(tape, out, (x_TD, at_T), values), expected)


def test_memory_is_taken_again():
    """A thousand layers one after another take what a few do."""
    layer = linear.PackedLinear(nn.Linear(256, 256, dtype=torch.bfloat16))
    x = torch.randn(64, 256).bfloat16()

    def deep(x):
        for _ in range(1000):
            x = elementwise.rms_norm(layer(x), one, 1e-5)
        return x

    one = torch.ones(256, dtype=torch.bfloat16)
    tape, out = record(deep, x, lasting=[*layer.buffers(), one])
    assert tape.length == 1, "kernels only"
    assert tape.memory_bytes <= 1 << 20
    value = torch.randn(64, 256).bfloat16()
    with torch.inference_mode():
        expected = deep(value)
    assert torch.equal(played(tape, out, (x,), (value,)), expected)


def test_what_is_made_of_weights_is_not_kept():
    """A layer that has codes, and weights only for the moment of its product."""
    codes = torch.randint(-9, 9, (128, 128), dtype=torch.int8)
    x = torch.randn(2, 128)

    def deep(x):
        for _ in range(50):
            weight = codes.float()
            weight *= 0.05
            x = torch.tanh(x @ weight)
        return x

    tape, out = record(deep, x, lasting=[codes])
    assert tape.memory_bytes <= 1 << 20 < 50 * 4 * 128 * 128
    codes.copy_(torch.randint(-9, 9, (128, 128), dtype=torch.int8))
    value = torch.randn(2, 128)
    with torch.inference_mode():
        expected = deep(value)
    assert torch.equal(played(tape, out, (x,), (value,)), expected)


def test_sums_are_torchs_to_the_bit():
    bits = torch.arange(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = bits[~bits.isnan()]
    x, y = numbers, numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(0))]
    z = torch.empty_like(x)
    with torch.inference_mode():
        assert elementwise.add(x, y, z)
    expected = x + y
    assert torch.equal(z.isnan(), expected.isnan())
    assert torch.equal(z[~z.isnan()].view(torch.int16), expected[~z.isnan()].view(torch.int16))


SOMEBODYS = torch.ones(4)
GIVEN = {
    "chance": (lambda x: x + torch.rand(4), "rand.* may differ"),
    "chance in place": (lambda x: (x * 1).uniform_(), "uniform_.* may differ"),
    "a number out of a tensor": (lambda x: x * x.sum().item(), "may differ"),
    "a shape by what is in it": (lambda x: x[x > 0], "may differ"),
    "where it is not zero": (lambda x: x.nonzero(), "may differ"),
    "a tensor of somebody's": (lambda x: x + SOMEBODYS, "neither among its inputs nor the model's"),
    "a number of Python's": (lambda x: x * torch.tensor(3.0), "may differ|neither"),
    "weights made of codes": (lambda x: x + CODES.float()[:4], "weights out of weights"),
    "a tensor that is not dense": (lambda x: torch.sparse_coo_tensor(INDEX, x, (4,)).to_dense(), "dense|may differ"),
    "weights that are changed": (lambda x: WEIGHT.add_(x), "changes what it is not to"),
}
WEIGHT = torch.ones(4)
CODES = torch.ones(1 << 19, dtype=torch.int8)
INDEX = torch.arange(4)[None]


@pytest.mark.parametrize("what", GIVEN)
def test_refused(what):
    compute, why = GIVEN[what]
    with pytest.raises(NotRepeatable, match=why):
        record(compute, torch.arange(4.0), lasting=[WEIGHT, CODES, INDEX])


def test_a_kernel_on_what_nobody_knows():
    x, out = torch.randn(16).bfloat16(), torch.empty(16, dtype=torch.bfloat16)

    def add(x):
        elementwise.add(x, x, out)
        return out

    with pytest.raises(NotRepeatable, match="fw_add_bf16 reads what is neither"):
        record(add, x)


def test_a_sum_and_its_norm_are_one_call():
    """To the bit as one after the other; not of another tensor."""
    weight = nn.Parameter(torch.rand(64).bfloat16(), requires_grad=False)
    x_TD, y_TD = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    for shifted in (False, True):
        for of_sum in (True, False):

            def compute(x_TD, y_TD, shifted=shifted, of_sum=of_sum):
                sum_TD = x_TD + y_TD
                normed_TD = elementwise.rms_norm(sum_TD if of_sum else y_TD, weight, 1e-5, shifted=shifted)
                return torch.cat([sum_TD, normed_TD])

            tape, out = record(compute, x_TD, y_TD, lasting=[weight])
            names = [kernel.name for kernel, _ in tape._items[0]._made]
            assert names == (["fw_add_rms_norm_bf16"] if of_sum else ["fw_add_bf16", "fw_rms_norm_bf16"])
            for _ in range(2):
                values = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16()
                with torch.inference_mode():
                    expected = compute(*(value.clone() for value in values))
                assert torch.equal(played(tape, out, (x_TD, y_TD), values), expected)
