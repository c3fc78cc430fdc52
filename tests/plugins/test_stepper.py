"""The step against plain PyTorch, and loss scaling against its definition."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fw.checkpointing.placement import initialise
from fw.errors import RunError
from fw.kinds.offload import OffloadPolicy
from fw.kinds.precision import LossScaling, PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw.meter.allocations import allocations
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.optimizer.adamw import AdamW, AdamWConfig
from fw_plugins.optimizer.adamw_8bit import AdamW8bit, AdamW8bitConfig
from fw_plugins.optimizer.lion import Lion, LionConfig
from fw_plugins.optimizer.sgd import SGD, SGDConfig
from fw_plugins.sharding.norm import global_norm
from fw_plugins.sharding.single import SingleRank
from fw_plugins.sharding.torch_stepper import parameter_groups

FP32 = PrecisionPolicy(torch.float32, torch.float32, torch.float32)
CPU = torch.device("cpu")
ON_DEVICE = OffloadPolicy()


def model() -> Llama:
    made = Llama(LlamaConfig(32, 2, 4, 2, intermediate_size=48), 50, 64, SDPAttention(None))
    for name, parameter in made.named_parameters():
        initialise(parameter.data, name, made.init(name), seed=0)
    return made


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(50, (4, 17), generator=generator) for _ in range(count)]


def loss_of(module, ids):
    return F.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("fused", [True, False])
def test_adamw_with_clipping_equals_plain_pytorch(clip, fused):
    ours = model()
    theirs = copy.deepcopy(ours)
    spec = AdamW(AdamWConfig(lr=1e-2, weight_decay=0.1, fused=fused)).spec(CPU)
    stepper = SingleRank(None).stepper(ours, None, StepSpec(FP32, ON_DEVICE, spec, clip))
    decayed = [p for n, p in theirs.named_parameters() if n.endswith("proj.weight") or n == "lm_head.weight"]
    others = [p for n, p in theirs.named_parameters() if not (n.endswith("proj.weight") or n == "lm_head.weight")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    for step, ids in enumerate(batches(5)):
        factor = 1 / (step + 1)
        with stepper.micro_batch(last=True), stepper.forward_context():
            stepper.backward(loss_of(stepper.module, ids))
        result = stepper.step(factor)
        loss_of(theirs, ids).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.step()
        optimizer.zero_grad()
        assert result.grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=name)


def test_micro_batches_add_up():
    whole, parts = model(), model()
    spec = SGD(SGDConfig(lr=0.1, momentum=0.9)).spec(CPU)
    one = SingleRank(None).stepper(whole, None, StepSpec(FP32, ON_DEVICE, spec, 0.0))
    many = SingleRank(None).stepper(parts, None, StepSpec(FP32, ON_DEVICE, spec, 0.0))
    for ids in batches(3):
        one.backward(loss_of(whole, ids))
        for part in ids.split(1):
            many.backward(loss_of(parts, part) / len(ids))
        one.step(1.0)
        many.step(1.0)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_the_optimizers_state_survives_a_round_trip():
    first = model()
    spec = AdamW(AdamWConfig(lr=1e-2)).spec(CPU)
    stepper = SingleRank(None).stepper(first, None, StepSpec(FP32, ON_DEVICE, spec, 1.0))
    for ids in batches(2):
        stepper.backward(loss_of(first, ids))
        stepper.step(1.0)
    second = copy.deepcopy(first)
    again = SingleRank(None).stepper(second, None, StepSpec(FP32, ON_DEVICE, spec, 1.0))
    again.load_optimizer_tensors({name: tensor.clone() for name, tensor in stepper.optimizer_tensors().items()})
    ids = batches(3)[2]
    for module, each in ((first, stepper), (second, again)):
        each.backward(loss_of(module, ids))
        each.step(1.0)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_loss_scaling_changes_nothing_but_skips_overflow():
    """In fp32, so that the mathematics of scaling is tested alone: a power of two cancels exactly."""
    plain, scaled = model(), model()
    spec = AdamW(AdamWConfig(lr=1e-2)).spec(CPU)
    one = SingleRank(None).stepper(plain, None, StepSpec(FP32, ON_DEVICE, spec, 0.5))
    policy = PrecisionPolicy(torch.float32, torch.float32, torch.float32, LossScaling(2.0**10, growth_interval=2))
    two = SingleRank(None).stepper(scaled, None, StepSpec(policy, ON_DEVICE, spec, 0.5))
    for number, ids in enumerate(batches(4)):
        for module, stepper in ((plain, one), (scaled, two)):
            stepper.backward(loss_of(module, ids))
            result = stepper.step(1.0)
            assert not result.skipped
        assert two.scalars() == {"loss_scale": 2.0 ** (10 + (number + 1) // 2), "good_steps": (number + 1) % 2}
    for a, b in zip(plain.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-6)
    before = [p.clone() for p in scaled.parameters()]
    two.backward(loss_of(scaled, ids) * float("inf"))
    result = two.step(1.0)
    assert result.skipped and two.scalars() == {"loss_scale": 2.0**11, "good_steps": 0}
    assert all(a.equal(b) for a, b in zip(before, scaled.parameters(), strict=True))
    assert all(p.grad is None for p in scaled.parameters())
    with pytest.raises(RunError, match="the loss itself diverges"):
        for _ in range(40):
            two.backward(loss_of(scaled, ids) * float("inf"))
            two.step(1.0)


@pytest.mark.parametrize("offload", [ON_DEVICE, OffloadPolicy(optimizer="cpu", gradients="cpu")])
def test_a_gradient_that_is_not_finite_changes_nothing(offload):
    module = model()
    stepper = SingleRank(None).stepper(module, None, StepSpec(FP32, offload, AdamW(AdamWConfig(lr=1e-2)).spec(CPU), 1.0))
    good, bad = batches(2)
    stepper.backward(loss_of(module, good))
    assert not stepper.step(1.0).skipped
    before = {name: tensor.clone() for name, tensor in {**dict(module.named_parameters()), **stepper.optimizer_tensors()}.items()}
    stepper.backward(loss_of(module, good))
    stepper.backward(loss_of(module, bad) * float("nan"))
    result = stepper.step(1.0)
    assert result.skipped and not result.grad_norm.isfinite()
    after = {**dict(module.named_parameters()), **stepper.optimizer_tensors()}
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in after)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("plugin", [AdamW(AdamWConfig(lr=1e-2)), AdamW8bit(AdamW8bitConfig(lr=1e-2)), Lion(LionConfig(lr=1e-3))])
def test_an_update_in_backward_is_the_same_and_keeps_no_gradients(plugin):
    made = {}
    for in_backward in (False, True):
        net = Llama(LlamaConfig(64, 8, 4, 2, intermediate_size=256), 64, 64, SDPAttention(None))
        for name, parameter in net.named_parameters():
            initialise(parameter.data, name, net.init(name), seed=0)
        spec = replace(plugin.spec(CPU), in_backward=in_backward)
        stepper = SingleRank(None).stepper(net, None, StepSpec(FP32, ON_DEVICE, spec))
        norms, peaks, lefts = [], [], []
        for number, ids in enumerate(batches(4)):
            stepper.begin_step(0.5)
            with allocations(CPU) as found:
                stepper.backward(loss_of(net, ids[:1, :5]))
            if number:  # the first step makes the state
                peaks.append(found.peak_bytes)
                lefts.append(found.left_bytes)
            norms.append(float(stepper.step(0.5).grad_norm))
            assert all(p.grad is None for p in net.parameters())
        made[in_backward] = net, stepper.optimizer_tensors(), norms, max(peaks), max(lefts)
    (plain, state, norms, peak, left), (net, other, others, least, nothing) = made[False], made[True]
    assert all(a.equal(b) for a, b in zip(plain.parameters(), net.parameters(), strict=True))
    assert state.keys() == other.keys() and all(state[key].equal(other[key]) for key in state)
    assert others == pytest.approx(norms, rel=1e-12)
    whole = sum(p.nbytes for p in net.parameters())
    assert left == whole < peak and nothing < 100 and least < 0.4 * whole, (peak, least, left, nothing, whole)


@pytest.mark.parametrize(("kept", "summed"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("offload", [ON_DEVICE, OffloadPolicy(optimizer="cpu", gradients="cpu")])
def test_gradients_are_summed_up_in_a_dtype_of_their_own(kept, summed, offload):
    ours, theirs = model().to(kept), model().to(kept)
    policy = PrecisionPolicy(kept, kept, torch.float32, accumulate=summed)
    stepper = SingleRank(None).stepper(ours, None, StepSpec(policy, offload, AdamW(AdamWConfig(lr=1e-2)).spec(CPU), 0.5))
    groups = parameter_groups(theirs.named_parameters(), theirs.undecayed(), 0.1)
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    for _ in range(3):
        sums = {}
        for ids in batches(4):
            with allocations(CPU) as found:
                stepper.backward(loss_of(ours, ids))
            loss_of(theirs, ids).backward()
            for parameter in theirs.parameters():
                sums[parameter] = (sums[parameter] + parameter.grad).to(summed) if parameter in sums else parameter.grad.to(summed)
                parameter.grad = None
            assert found.left_bytes in (0, sum(grad.nbytes for grad in sums.values())), "nothing is kept but the sums"
        norm = torch.cat([grad.flatten().double() for grad in sums.values()]).norm()
        for parameter, grad in sums.items():
            parameter.grad = (grad * (0.5 / (norm + 1e-6)).clamp(max=1.0).float()).to(kept)
        result = stepper.step(1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-6)
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6 if kept == torch.float32 else 1e-3, rtol=1e-4, msg=name)
            b.data.copy_(a)  # else the last bit of a weight would decide how a gradient is rounded


def test_nothing_but_weights_and_state_outlives_a_step():
    """The bytes after a step are those before it, from the second step on."""
    module = model()
    stepper = SingleRank(None).stepper(module, None, StepSpec(FP32, ON_DEVICE, AdamW(AdamWConfig()).spec(CPU), 1.0))
    for number, ids in enumerate(batches(3)):
        with allocations(CPU) as found:
            stepper.backward(loss_of(module, ids))
            stepper.step(1.0)
        moments = sum(t.nbytes for t in stepper.optimizer_tensors().values())
        assert found.left_bytes == (moments if number == 0 else 0)


def by_parameter(grads):
    return {torch.nn.Parameter(torch.empty_like(grad)): grad for grad in grads}


def test_the_global_norm_is_accurate_where_torchs_is_not():
    grads = [torch.randn(4096, 1024, generator=torch.Generator().manual_seed(0)) * 0.01, torch.randn(64)]
    exact = torch.cat([g.double().flatten() for g in grads]).norm()
    assert abs(global_norm(by_parameter(grads)) - exact) / exact < 1e-7


def test_the_global_norm_of_odd_shapes():
    grads = [torch.tensor(3.0), torch.empty(0), torch.empty(0, 5), torch.tensor([[4.0]])]
    assert global_norm(by_parameter(grads)).item() == 5.0
    assert global_norm(by_parameter([torch.empty(0)])).item() == 0.0
