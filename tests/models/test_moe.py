"""Experts: the grouped product against a loop, no size that depends on data, the balance by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from fw_models.layers import MoE, balance_loss
from fw_models.layers.grouped import grouped_linear
from fw_models.mixtral import Mixtral, MixtralConfig
from fw_plugins.attention.eager import EagerAttention

SIZES = [5, 0, 9, 1, 0]


def problem(dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(SIZES), 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    weight = torch.randn(len(SIZES), 12, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
    return rows, weight, torch.tensor(SIZES).cumsum(0).to(torch.int32)


def by_loop(rows, weight):
    return torch.cat([part @ weight[group].T for group, part in enumerate(rows.split(SIZES))])


def test_grouped_product_and_gradients_equal_a_loop():
    rows, weight, ends = problem()
    out, expected = grouped_linear(rows, weight, ends), by_loop(rows, weight)
    torch.testing.assert_close(out, expected)
    cotangent = torch.randn_like(out)
    found = torch.autograd.grad(out, (rows, weight), cotangent)
    for one, two in zip(found, torch.autograd.grad(expected, (rows, weight), cotangent), strict=True):
        torch.testing.assert_close(one, two)
    assert not found[1][1].any() and not found[1][4].any()  # experts without a token
    torch.autograd.gradcheck(grouped_linear, (rows, weight, ends))


def test_autocast_multiplies_in_its_dtype():
    rows, weight, ends = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = grouped_linear(rows, weight, ends)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), by_loop(rows, weight), atol=0.1, rtol=0.05)
    out.sum().backward()  # a gradient that is expanded, not stored
    assert weight.grad.dtype == torch.float32


def test_the_operators_keep_torchs_rules():
    rows, weight, ends = problem(torch.float32)
    torch.library.opcheck(torch.ops.fw.grouped_mm, (rows, weight.transpose(1, 2), ends))
    torch.library.opcheck(torch.ops.fw.grouped_outer, (rows.detach(), rows.detach(), ends))


def naive(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """Each token alone, its experts one after another."""
    out = torch.zeros_like(x)
    for b in range(x.shape[0]):
        for position in range(x.shape[1]):
            token = x[b, position]
            probabilities = (moe.gate.weight @ token).softmax(0)
            weights, chosen = probabilities.topk(moe.top_k)
            if moe.normalise:
                weights = weights / weights.sum()
            for weight, expert in zip(weights, chosen, strict=True):
                e = moe.experts
                hidden = F.silu(e.gate_proj[expert] @ token) * (e.up_proj[expert] @ token)
                out[b, position] += weight * (e.down_proj[expert] @ hidden)
    return out


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("top_k", [1, 3])
def test_equals_each_token_alone(normalise, top_k):
    torch.manual_seed(0)
    moe = MoE(16, 24, 7, top_k, normalise=normalise)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(moe(x)[0], naive(moe, x), atol=1e-5, rtol=1e-5)
    skewed = torch.randn(1, 1, 16).expand(2, 5, 16)  # every token to the same experts
    torch.testing.assert_close(moe(skewed)[0], naive(moe, skewed), atol=1e-5, rtol=1e-5)


def small() -> Mixtral:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    return Mixtral(MixtralConfig(**shape, num_local_experts=5), 61, 16, EagerAttention(None))


def loss_of(model: Mixtral, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, readout=lambda x, head, auxiliary: head(x).logsumexp(-1).mean() + auxiliary)


def test_no_size_depends_on_data():
    """Forward and backward with fake tensors, which raise wherever a size would have to be known."""
    with FakeTensorMode():
        model = small().train()
        loss_of(model, torch.zeros(2, 16, dtype=torch.int64)).backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


def test_compiles_as_one_graph():
    torch.manual_seed(0)
    model = small().train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.randint(61, (2, 16))
    plain = loss_of(model, ids)
    plain.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    compiled = loss_of(model, ids)
    compiled.backward()
    torch.testing.assert_close(compiled, plain)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


def test_flops_count_the_experts_of_a_token():
    from torch.utils.flop_counter import FlopCounterMode

    model = small()
    ids = torch.zeros(3, 16, dtype=torch.int64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert model.flops_per_token(16) * ids.numel() == counter.get_total_flops()


def test_balance_by_hand():
    """Two tokens, three experts, one choice each: both go to expert 0; a third one is padding."""
    logits = torch.tensor([[[2.0, 0.0, 1.0], [3.0, 1.0, 0.0], [0.0, 9.0, 0.0]]])
    p = logits.softmax(-1)[0]
    expected = 3 * 1.0 * (p[0, 0] + p[1, 0]) / 2
    torch.testing.assert_close(balance_loss([logits], 1, torch.tensor([[True, True, False]])), expected)
    mean = p.mean(0)
    torch.testing.assert_close(balance_loss([logits], 1, None), 3 * (2 / 3 * mean[0] + 1 / 3 * mean[1]))
    even = torch.zeros(1, 4, 4)
    torch.testing.assert_close(balance_loss([even, even], 2, None), torch.tensor(2.0))
