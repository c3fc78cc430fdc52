"""Norms, rotation, gates and losses with gradients against the same in float64 and plain operators."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fw.kernels import differentiable, loss
from fw.kernels.calls import heard
from fw_models.layers import GatedMLP, RMSNorm
from fw_plugins.activation.keeping import keeping
from fw_plugins.activation.recompute import recompute
from fw_plugins.activation.selective import operators

PLAIN = {"ignored": -100, "softcap": None, "smoothing": 0.0, "z_loss": 0.0}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
pytestmark = pytest.mark.skipif(not differentiable._NORM.available, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def kernels_train(monkeypatch):
    monkeypatch.setenv("FW_TRAINING_KERNELS", "on")


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape, dtype=torch.float32, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    return drawn


def exact(x):
    return x.detach().double().requires_grad_()


def assert_close(found, expected, dtype):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=(2e-5 if dtype == torch.float32 else 1e-2) * b.abs().max().item())


@pytest.mark.parametrize("size", [48, 512, 40_000])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["fp32 weight", "bf16 weight"])
@DTYPES
def test_norm(dtype, weight_dtype, shifted, size, draw):
    x, weight, grad = draw(3, 37, size, dtype=dtype), draw(size, dtype=weight_dtype), draw(3, 37, size, dtype=dtype)
    x.requires_grad_(), weight.requires_grad_()
    y = differentiable.rms_norm(x, weight, 1e-5, shifted=shifted)
    y.backward(grad)
    x64, weight64 = exact(x), exact(weight)
    y64 = x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-5) * (weight64 + (1 if shifted else 0))
    y64.backward(grad.double())
    assert y.dtype == dtype and weight.grad.dtype == weight_dtype
    assert_close([y, x.grad, weight.grad], [y64, x64.grad, weight64.grad], max(dtype, weight_dtype, key=lambda each: -each.itemsize))


def test_norm_is_in_autocasts_dtype_and_takes_its_gradients(draw):
    norm = RMSNorm(64, 1e-5)
    x = draw(2, 5, 64).requires_grad_()
    torch.nn.init.ones_(norm.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = norm(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == norm.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16):
        assert differentiable.rms_norm(x, norm.weight, 1e-5) is None
        assert norm(x).dtype == torch.float32


@pytest.mark.parametrize("rows", [1, 2], ids=["one row of angles", "angles of each row"])
@DTYPES
def test_rotation(dtype, rows, draw):
    x, grad, angles = draw(2, 19, 3, 64, dtype=dtype).requires_grad_(), draw(2, 3, 19, 64, dtype=dtype), draw(rows, 1, 19, 64)
    y = differentiable.rotate(x.transpose(1, 2), angles.cos(), angles.sin())
    y.backward(grad)
    x64 = exact(x)
    first, second = x64.transpose(1, 2).chunk(2, -1)
    y64 = x64.transpose(1, 2) * angles.double().cos() + torch.cat((-second, first), -1) * angles.double().sin()
    y64.backward(grad.double())
    assert_close([y, x.grad], [y64, x64.grad], dtype)


@DTYPES
def test_gate(dtype, draw):
    gate, up, grad = (draw(5, 7, 48, dtype=dtype, scale=3.0) for _ in range(3))
    gate.requires_grad_(), up.requires_grad_()
    y = differentiable.silu_mul(gate, up)
    y.backward(grad)
    gate64, up64 = exact(gate), exact(up)
    y64 = F.silu(gate64) * up64
    y64.backward(grad.double())
    assert_close([y, gate.grad, up.grad], [y64, gate64.grad, up64.grad], dtype)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.01)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("size", [50, 1000, 16])
@DTYPES
def test_loss(dtype, size, softcap, smoothing, z_loss, draw):
    z, labels = draw(33, size, dtype=dtype, scale=4.0), torch.randint(0, size, (33,), generator=torch.Generator().manual_seed(0))
    labels[2] = -100
    z64 = exact(z)
    capped = z64 if softcap is None else softcap * torch.tanh(z64 / softcap)
    lse = capped.logsumexp(-1)
    chosen = capped.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    expected = (lse - (1 - smoothing) * chosen - smoothing * capped.mean(-1) + z_loss * lse.square()) * (labels != -100)
    expected.sum().backward()
    how = {"ignored": -100, "softcap": softcap, "smoothing": smoothing, "z_loss": z_loss}
    before = z.clone()
    alone = loss.token_losses(z, labels, gradient=False, **how)
    assert torch.equal(z, before)
    losses = loss.token_losses(z, labels, gradient=True, **how)
    assert torch.equal(alone, losses) and losses[2] == 0 and not z[2].any()
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert_close([z], [z64.grad], dtype)


@pytest.mark.parametrize("label", [40, -1, 1 << 40])
def test_a_label_of_no_token_is_refused_as_torch_does(label, draw):
    z, labels = draw(3, 40), torch.tensor([0, label, 2])
    for refused in (lambda: F.cross_entropy(z, labels), lambda: loss.token_losses(z, labels, gradient=True, **PLAIN)):
        with pytest.raises(IndexError, match=str(label)):
            refused()
    with pytest.raises(ValueError, match="int64"):
        loss.token_losses(z, labels.clamp(0, 39).int(), gradient=True, **PLAIN)


def test_a_loss_of_what_is_not_a_number_is_none(draw):
    z = draw(3, 40)
    z[1, 5] = float("nan")
    losses = loss.token_losses(z, torch.tensor([0, 1, 2]), gradient=True, **PLAIN)
    assert losses.isnan().tolist() == [False, True, False]


def test_a_plan_knows_what_comes_back_and_what_is_kept(draw):
    mlp, norm = GatedMLP(64, 96), RMSNorm(64, 1e-5)
    x = draw(4, 32, 64).requires_grad_()

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = mlp(norm(x))
        y.sum().backward()
        return y, x.grad

    saved = {}

    def note(tensor):
        if tensor.shape[0] in (4, 128):  # rows; weights have other sizes
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        real = step(x)
    # The norm's input, what its rows were scaled by, and its result, which both products share; gate, up and their product.
    assert sum(saved.values()) == 128 * (64 * 4 + 4 + 64 * 2 + 3 * 96 * 2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x.detach()).requires_grad_()
        planned = step(fake)
    for a, b in zip(planned, real, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_compiled_blocks_and_generation_do_without(draw):
    x, weight = draw(2, 64), draw(64)
    with torch.inference_mode():
        assert differentiable.rms_norm(x, weight, 1e-5) is None
    assert differentiable.rms_norm(x[:, ::2], weight[::2], 1e-5) is None
    assert differentiable.rms_norm(x.double(), weight.double(), 1e-5) is None
    assert differentiable.rms_norm(x.to("meta"), weight.to("meta"), 1e-5) is None
    assert torch.compile(lambda x: differentiable.rms_norm(x, weight, 1e-5) is None, backend="eager")(x)


TWICE = {
    "norm": (
        lambda x, w: differentiable.rms_norm(x, w, 1e-5),
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * w,
        ((3, 7, 48), (48,)),
    ),
    "shifted norm": (
        lambda x, w: differentiable.rms_norm(x, w, 1e-5, shifted=True),
        lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (1 + w),
        ((3, 7, 48), (48,)),
    ),
    "gate": (differentiable.silu_mul, lambda gate, up: F.silu(gate) * up, ((5, 48), (5, 48))),
    "rotation": (
        lambda x: differentiable.rotate(x.transpose(1, 2), ANGLES.cos(), ANGLES.sin()),
        lambda x: (
            x.transpose(1, 2) * ANGLES.cos() + torch.cat((-x.transpose(1, 2)[..., 32:], x.transpose(1, 2)[..., :32]), -1) * ANGLES.sin()
        ),
        ((2, 5, 3, 64),),
    ),
}
ANGLES = torch.linspace(0, 3, 5 * 64).view(1, 1, 5, 64)


@pytest.mark.parametrize("name", TWICE)
def test_gradients_can_be_differentiated_again(name, draw):
    ours, torchs, shapes = TWICE[name]
    given = [draw(*shape).requires_grad_() for shape in shapes]
    exactly = [exact(x) for x in given]
    found = []
    for compute, inputs in ((ours, given), (torchs, exactly)):
        gradients = torch.autograd.grad(compute(*inputs).square().sum(), inputs, create_graph=True)
        norm = sum(x.square().sum() for x in gradients)
        found.append([*gradients, *torch.autograd.grad(norm, inputs)])
    assert_close(*found, torch.float32)


@pytest.mark.parametrize("name", TWICE)
def test_a_graph_that_is_kept_gives_the_same_gradients_again(name, draw):
    ours, _, shapes = TWICE[name]
    given = [draw(*shape).requires_grad_() for shape in shapes]
    y = ours(*given).square().sum()
    first, second = (torch.autograd.grad(y, given, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_transforms_are_left_to_torch(draw, monkeypatch):
    mlp, norm, x, along = GatedMLP(64, 96), RMSNorm(64, 1e-5), draw(4, 64), draw(4, 64)
    torch.nn.init.ones_(norm.weight)

    def loss(x):
        return mlp(norm(x)).square().sum()

    def derivatives():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, along)
            forward = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
        return torch.func.jvp(loss, (x,), (along,))[1], forward, torch.func.grad(loss)(x)

    found = derivatives()
    monkeypatch.setenv("FW_TRAINING_KERNELS", "off")
    for a, b in zip(found, derivatives(), strict=True):
        assert a.abs().max() > 0 and torch.equal(a, b)


def test_what_a_gate_gives_can_be_kept_where_a_block_is_recomputed(draw):
    mlp, x = GatedMLP(64, 96), draw(4, 64).requires_grad_()
    gates = {}
    for save in ("fw.silu_mul", "aten.mul"):
        saved, called = operators(save), []
        block = torch.nn.Sequential(mlp)
        recompute(block, keeping(lambda saved=saved: lambda packet, number: str(packet) in saved))
        y = block(x).sum()
        with heard(lambda kernel, given, called=called: called.append(kernel.name)):
            y.backward()
        gates[save] = called.count("fw_gate_forward")
    assert gates == {"fw.silu_mul": 0, "aten.mul": 1}
