"""The peak of a step by category, against numbers by hand, autograd's own saved tensors and the plain sum of allocations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from fw.checkpointing.placement import initialise
from fw.kinds.offload import OffloadPolicy
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw.meter.allocations import allocations
from fw.meter.step_memory import ACTIVATIONS, COPIES, GRADIENTS, HEAD, OPTIMIZER, OTHER, WEIGHTS, StepMeter
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.activation.blocks import Full
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.optimizer.adamw import AdamW, AdamWConfig
from fw_plugins.sharding.single import SingleRank

CPU = torch.device("cpu")
FP32 = PrecisionPolicy(torch.float32, torch.float32, torch.float32)
BF16 = PrecisionPolicy(torch.float32, torch.bfloat16, torch.float32)


def made(policy=FP32, offload=None, **arguments):
    net = Llama(LlamaConfig(64, 3, 4, 2, intermediate_size=96), 200, 64, SDPAttention(None))
    for name, parameter in net.named_parameters():
        initialise(parameter.data, name, net.init(name), seed=0)
    spec = StepSpec(policy, offload or OffloadPolicy(), AdamW(AdamWConfig()).spec(CPU), 1.0, **arguments)
    return net, SingleRank(None).stepper(net, None, spec)


def forward(net, stepper, ids):
    with stepper.forward_context():
        logits = net(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def metered(net, stepper, ids, micro_batches=1):
    meter = StepMeter(stepper, net.blocks, CPU)
    with meter.step() as found:
        for _ in range(micro_batches):
            meter.forward()
            loss = forward(net, stepper, ids)
            meter.backward()
            stepper.backward(loss)
            meter.update()
            del loss
        stepper.step(1.0)
    return found[0]


@pytest.fixture
def ids():
    return torch.randint(200, (4, 65), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("policy", [FP32, BF16])
def test_the_sum_is_the_allocators_and_kept_state_is_counted_to_the_byte(policy, ids):
    net, stepper = made(policy)
    metered(net, stepper, ids)
    with allocations(CPU) as plain:
        stepper.backward(forward(net, stepper, ids))
        stepper.step(1.0)
    found = metered(net, stepper, ids)
    parameters = list(net.parameters())
    weights = sum(p.nbytes for p in parameters)
    assert found.by_category[WEIGHTS] == weights
    assert found.by_category[OPTIMIZER] == 2 * weights + 4 * len(parameters)  # two moments and a count of steps for each
    assert sum(found.by_category.values()) == found.peak_bytes
    before = weights + found.by_category[OPTIMIZER] + found.by_category[OTHER]
    assert ids.nbytes <= found.by_category[OTHER]
    assert found.peak_bytes - before == plain.peak_bytes
    assert found.phase == "backward"


def test_activations_are_what_autograd_saves(ids):
    net, stepper = made()
    metered(net, stepper, ids)
    saved = {}
    parameters = {p.untyped_storage().data_ptr() for p in net.parameters()} | {ids.untyped_storage().data_ptr()}
    last: list[torch.Tensor] = []

    def pack(tensor):
        if not last:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    handle = net.blocks[-1].register_forward_hook(lambda module, args, output: last.append(output))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(net, stepper, ids)
    handle.remove()
    saved[last[0].untyped_storage().data_ptr()] = last[0].untyped_storage()
    expected = sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in parameters)
    del loss
    last.clear()
    peak = found_at_end_of_forward(net, stepper, ids)
    assert peak[ACTIVATIONS] == expected


def found_at_end_of_forward(net, stepper, ids):
    """What is there at a peak that is made to come right after forward."""
    meter = StepMeter(stepper, net.blocks, CPU)
    with meter.step() as found:
        meter.forward()
        loss = forward(net, stepper, ids)
        meter.backward()
        torch.empty(64 << 20, dtype=torch.uint8)
        del loss
    assert found[0].phase == "backward"
    return found[0].by_category


def test_recomputation_leaves_inputs_of_blocks(ids):
    net, stepper = made()
    Full(None).apply(net, None, 64)
    metered(net, stepper, ids)
    kept = found_at_end_of_forward(net, stepper, ids)[ACTIVATIONS]
    hidden = 4 * 64 * 64 * 4  # B, L, D, fp32
    angles = 2 * 4 * 64 * 16 * 4  # cosine and sine
    assert 4 * hidden <= kept <= 4 * hidden + 2 * angles, "three inputs, and the last output"


def test_converted_weights_are_told_from_activations(ids):
    net, stepper = made(BF16)
    metered(net, stepper, ids)
    linear = sum(p.nbytes for name, p in net.named_parameters() if p.dim() == 2 and not name.startswith("embed"))
    assert found_at_end_of_forward(net, stepper, ids)[COPIES] == linear // 2


def test_gradients_of_an_earlier_micro_batch_are_gradients(ids):
    net, stepper = made()
    metered(net, stepper, ids)
    weights = sum(p.nbytes for p in net.parameters())
    first = metered(net, stepper, ids[:1])
    found = metered(net, stepper, ids, micro_batches=2)
    assert first.by_category.get(GRADIENTS, 0) <= weights <= found.by_category[GRADIENTS]
    assert found.by_category[HEAD] >= 4 * 64 * 200 * 4  # the logits


def test_hooks_are_gone_afterwards_and_results_are_the_same(ids):
    (net, stepper), (other, plain) = made(), made()
    for _ in range(3):
        metered(net, stepper, ids)
        plain.backward(forward(other, plain, ids))
        plain.step(1.0)
    assert all(a.equal(b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    for module in (net, *net.blocks):
        assert isinstance(module, nn.Module) and not module._forward_pre_hooks and not module._forward_hooks
    assert not any(p._backward_hooks for p in net.parameters())
