"""The kernel of linear layers, for this processor and for any, against products in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fw.kernels import elementwise, grouped, linear
from fw.kernels.build import NotCompiled, library
from fw.kernels.calls import Kernel
from fw.kernels.room import Room
from kernels.flags import ANY_PROCESSOR, AVX2, NO_TILES, TILES_IN_SOFTWARE, compiled_so

WAYS = {
    "this processor": (),
    "without tiles": NO_TILES,
    "tiles in software": TILES_IN_SOFTWARE,
    "256 bits": AVX2,
    "any processor": ANY_PROCESSOR,
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def kernel(request, monkeypatch):
    compiled_so(monkeypatch, request.param, linear, "LINEAR")


def layer(outputs: int, inputs: int, bias: bool) -> torch.nn.Linear:
    torch.manual_seed(outputs + inputs)
    return torch.nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


@pytest.mark.parametrize("outputs, inputs", [(32, 2), (96, 64), (33, 50), (1, 130), (257, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_products(kernel, outputs, inputs, bias):
    of = layer(outputs, inputs, bias)
    packed = linear.PackedLinear(of)
    for rows in (1, 2, 3, 7, 12, 13, 25, 130):
        x = torch.randn(rows, inputs).bfloat16()
        expected = F.linear(x.double(), of.weight.double(), of.bias.double() if bias else None)
        found = packed(x)
        # Rounded once, to 8 bits; sums of fp32 before it.
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-5 * inputs**0.5)
        each = torch.cat([packed(x[row : row + 1]) for row in range(rows)])
        assert torch.equal(found, each), "a row alone, and beside others"
    assert packed(torch.randn(2, 3, 2 * inputs).bfloat16()[..., ::2]).shape == (2, 3, outputs), "also of what is not contiguous"


@pytest.mark.parametrize("made", [linear.PackedLinear, linear.Int8Linear, linear.W8A8Linear])
def test_rows_that_are_more_than_stay_near(kernel, made):
    """They are taken some at a time."""
    packed, x = made(layer(40, 8192, True)), torch.randn(300, 8192).bfloat16()
    assert torch.equal(packed(x), torch.cat([packed(some) for some in x.split(50)]))


@pytest.mark.parametrize("outputs, inputs", [(32, 2), (96, 64), (33, 50), (1, 130), (257, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_codes(kernel, outputs, inputs, bias):
    """Against the same codes multiplied in fp64."""
    of = layer(outputs, inputs, bias)
    if outputs > 2:
        of.weight[1] = 0
    scale = of.weight.float().abs().amax(1, keepdim=True) / 127
    codes = (of.weight.float() / scale).nan_to_num().round()
    weight = codes.double() * scale.double()
    assert (weight - of.weight.double()).abs().amax() <= scale.amax() * 0.501
    for made, whole in ((linear.Int8Linear, False), (linear.W8A8Linear, True)):
        packed = made(of)
        assert packed.weight_bytes == packed.packed.numel() + 4 * outputs * (1 + whole)
        for rows in (1, 2, 3, 7, 12, 13, 25, 130):
            x = torch.randn(rows, inputs).bfloat16()
            x[rows // 2] *= rows == 1
            seen = x.double()
            if whole:
                step = x.float().abs().amax(1, keepdim=True) / 127
                seen = (x.float() * torch.where(step > 0, 1 / step, 0)).round().double() * step.double()
            expected = F.linear(seen, weight, of.bias.double() if bias else None)
            found = packed(x)
            torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=(0.02 if whole else 1e-5) * inputs**0.5)
            off = (found.double() - expected).norm() / expected.norm()
            assert off < 0.004, "codes that lie between two are rare"
            each = torch.cat([packed(x[row : row + 1]) for row in range(rows)])
            assert torch.equal(found, each), "a row alone, and beside others"


@pytest.mark.parametrize("outputs, inputs", [(32, 2), (96, 64), (33, 50), (1, 130), (257, 1024), (64, 94)])
def test_products_of_what_lies_as_in_a_file(kernel, outputs, inputs):
    """The same to the last bit as of what is packed, rows or columns one behind another; W itself is what is read."""
    of = layer(outputs, inputs, True)
    packed = linear.PackedLinear(of)
    for columns in (False, True):
        weight = of.weight.t().contiguous().t() if columns else of.weight
        of.weight = torch.nn.Parameter(weight, requires_grad=False)
        plain = linear.PlainLinear(of)
        assert plain.packed.data_ptr() == of.weight.data_ptr() and plain.weight_bytes == of.weight.nbytes
        for rows in (1, 5, 25):
            x = torch.randn(rows, inputs).bfloat16()
            assert torch.equal(plain(x), packed(x))


def test_what_is_packed():
    assert linear.takes(layer(4, 6, True))
    for other in (layer(4, 5, True), layer(4, 6, True).float(), torch.nn.Bilinear(2, 2, 2), torch.nn.Embedding(3, 4).bfloat16()):
        assert not linear.takes(other)
    weight = torch.arange(12.0).view(2, 6).bfloat16()
    packed = linear.packed(weight, Room())
    assert packed.shape == (1, 3, 32, 2) and packed[0, 1, 1].tolist() == [8.0, 9.0] and not packed[:, :, 2:].any()


def test_no_compiler(monkeypatch, tmp_path):
    library.cache_clear()
    monkeypatch.setenv("FW_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(NotCompiled, match=r"/bin/false refuses [a-z]+\.cpp: it says nothing"):
        library()
    monkeypatch.setenv("FW_KERNELS", "off")
    with pytest.raises(NotCompiled, match="FW_KERNELS=off"):
        library()
    library.cache_clear()


def grouped_layer(outputs: int, inputs: int, group: int, bits: int, offset: bool, bias: bool) -> tuple[grouped.GroupedLinear, torch.Tensor]:
    """A layer, and the weight that its codes stand for, in fp64."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    scale_OG = torch.rand((outputs, inputs // group), generator=generator) + 0.01
    offset_OG = torch.randn((outputs, inputs // group), generator=generator) if offset else None
    plain = layer(outputs, inputs, bias)
    if bits == 4:
        numbers = torch.randn(16, generator=generator).bfloat16()
        of_each = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
        codes, values = of_each[:, 0::2] | of_each[:, 1::2] << 4, numbers.double()[of_each.long()]
    else:
        numbers = None
        codes = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
        values = codes.double()
    given = grouped.GroupedCodes(codes, numbers, scale_OG, offset_OG)
    assert grouped.GroupedLinear.takes(given)
    spread = [None if x is None else x.double().repeat_interleave(group, 1) for x in (scale_OG, offset_OG)]
    weight_OI = values * spread[0] + (0 if spread[1] is None else spread[1])
    return grouped.GroupedLinear(plain, given), weight_OI


@pytest.mark.parametrize(
    "outputs, inputs, group", [(32, 2, 2), (96, 64, 32), (33, 48, 16), (1, 130, 130), (257, 1024, 128), (40, 672, 96), (32, 1280, 640)]
)
@pytest.mark.parametrize("bits, offset, bias", [(4, False, False), (4, True, True), (8, False, True), (8, True, False)])
def test_products_of_codes_in_groups(kernel, outputs, inputs, group, bits, offset, bias):
    made, weight_OI = grouped_layer(outputs, inputs, group, bits, offset, bias)
    bias_O = None if made.bias is None else made.bias.double()
    assert made.weight_bytes <= -(-outputs // 32) * 32 * (inputs * bits // 8 + inputs // group * 8) + 32
    for rows in (1, 2, 7, 12, 13, 25, 130):
        x = torch.randn(rows, inputs).bfloat16()
        expected = F.linear(x.double(), weight_OI, bias_O)
        found = made(x)
        assert found.dtype == torch.bfloat16 and found.shape == expected.shape
        sizes = F.linear(x.double().abs(), weight_OI.abs(), None if bias_O is None else bias_O.abs())
        assert ((found.double() - expected).abs() <= expected.abs() * 2**-8 + sizes * 2**-18).all()
        for row in range(rows):
            assert torch.equal(made(x[row : row + 1])[0], found[row]), "a row depends on its company"


def test_codes_in_groups_share_what_they_are_given(kernel):
    layers = [grouped_layer(outputs, 64, 16, 4, offset, False)[0] for outputs, offset in ((64, True), (32, False), (40, True))]
    x = torch.randn(3, 64).bfloat16()
    alone = [each(x) for each in layers]
    linear.Together.join(layers)
    assert all(torch.equal(each(x), one) for each, one in zip(layers, alone, strict=True))


def test_groups_that_the_kernel_does_not_take():
    codes = torch.zeros(4, 15, dtype=torch.uint8)
    numbers = torch.zeros(16, dtype=torch.bfloat16)
    assert grouped.GroupedLinear.takes(grouped.GroupedCodes(codes, numbers, torch.ones(4, 5), None))
    assert not grouped.GroupedLinear.takes(grouped.GroupedCodes(codes, numbers, torch.ones(4, 10), None)), "groups of three"


@pytest.mark.parametrize("made", [linear.PackedLinear, linear.Int8Linear, linear.W8A8Linear, linear.PlainLinear, "codes"])
def test_one_layer_gates_another(request, kernel, monkeypatch, made):
    """To the bit as their results put together afterwards, whose own function is compared with torch's."""
    flags = request.node.callspec.params["kernel"]
    monkeypatch.setattr(elementwise, "_SILU_MUL", Kernel(elementwise._SILU_MUL.name, elementwise._SILU_MUL.arguments, flags))
    for outputs, inputs in ((48, 64), (2816, 96), (32, 4096)):

        def one(bias, outputs=outputs, inputs=inputs):
            return grouped_layer(outputs, inputs, 16, 4, True, bias)[0] if made == "codes" else made(layer(outputs, inputs, bias))

        gate, up = one(True), one(False)
        if made != "codes":
            up = made(torch.nn.Linear(inputs, outputs).bfloat16().requires_grad_(False))
        with torch.inference_mode():
            for rows in (1, 3, 16, 70, 700):
                x = torch.randn(rows, inputs).bfloat16()
                assert linear.silu_gated(gate, up, x) is None, "computed apart"
                expected = elementwise.silu_mul(gate(x), up(x))
                near = F.silu(gate(x).double()) * up(x).double()
                torch.testing.assert_close(expected.double(), near, rtol=2**-8, atol=1e-6)
                linear.Together.join([gate, up])
                assert torch.equal(linear.silu_gated(gate, up, x), expected)
                gate.together, up.together = linear.Together([gate]), linear.Together([up])


def test_what_gates_is_not_computed_together_where_somebody_hears_of_it():
    gate, up, x = linear.PackedLinear(layer(32, 64, False)), linear.PackedLinear(layer(32, 64, True)), torch.randn(2, 64).bfloat16()
    linear.Together.join([gate, up])
    assert linear.silu_gated(up, gate, x) is None and linear.silu_gated(gate, torch.nn.Identity(), x) is None
    hook = up.register_forward_hook(lambda module, args, out: out + 1)
    assert linear.silu_gated(gate, up, x) is None
    hook.remove()
    assert linear.silu_gated(gate, up, x) is not None
    uneven = [linear.PackedLinear(layer(40, 64, False)) for _ in range(2)]
    linear.Together.join(uneven)
    assert linear.silu_gated(*uneven, x) is None, "forty are no whole registers"
