"""The choice of what to recompute: optimal where all choices can be tried, within the budget by the allocator's count, and honest."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from fw.errors import RunError, UserError
from fw.meter.allocations import allocations
from fw_plugins.activation.auto import kept_bytes, repeated_cost
from fw_plugins.activation.choosing import Choice, choose, least_bytes
from fw_plugins.activation.profiling import BlockProfile, Operation, profile
from plugins.test_activation import CPU, LENGTH, MODELS, batch, build, flops, gradients, plain


def every_choice(block: BlockProfile) -> list[Choice]:
    keys = [
        operation.key for operation in block.operations if operation.kept_bytes
    ]  # a view, or a result in its input's place, is not kept
    subsets = itertools.chain.from_iterable(itertools.combinations(keys, n) for n in range(len(keys) + 1))
    return [Choice(False, frozenset()), *(Choice(True, frozenset(subset)) for subset in subsets)]


def by_brute_force(blocks: list[BlockProfile], budget: int) -> float:
    """The least cost over all choices of all blocks."""
    best = float("inf")
    for choices in itertools.product(*map(every_choice, blocks)):
        pairs = list(zip(blocks, choices, strict=True))
        if sum(kept_bytes(*pair) for pair in pairs) <= budget:
            best = min(best, sum(repeated_cost(*pair) for pair in pairs))
    return best


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_there_is(seed):
    chance = random.Random(seed)
    blocks = []
    for _ in range(chance.randint(1, 3)):
        operations = tuple(Operation(("aten.op", i), chance.randint(0, 20), chance.choice([0.0, 1.0, 7.5, 30.0])) for i in range(4))
        blocks.append(BlockProfile(chance.randint(1, 5), chance.randint(20, 60), operations))
    if seed % 2:
        blocks.append(blocks[0])  # as in a model, whose blocks are alike
    most = sum(block.saved_bytes for block in blocks)
    for budget in {least_bytes(blocks), *(chance.randint(least_bytes(blocks), most) for _ in range(3)), most}:
        found = list(zip(blocks, choose(blocks, budget), strict=True))
        assert sum(kept_bytes(*pair) for pair in found) <= budget
        assert sum(repeated_cost(*pair) for pair in found) == pytest.approx(by_brute_force(blocks, budget))


def test_many_deep_blocks_are_chosen_for_within_a_hundredth():
    """Above the limit ways are merged; the cost is bounded from below by that of a choice whose parts may be fractions."""
    chance = random.Random(1)
    kinds = [tuple(Operation(("aten.op", i), chance.randint(1, 10**9), chance.random() * 1e12) for i in range(40)) for _ in range(2)]
    blocks = [BlockProfile(10**7, 10**12, kinds[i % 2]) for i in range(60)]
    budget = 60 * 10**7 + 3 * 10**11
    pairs = list(zip(blocks, choose(blocks, budget), strict=True))
    assert sum(kept_bytes(*pair) for pair in pairs) <= budget
    left, bound = budget - least_bytes(blocks), sum(block.cost for block in blocks)
    for operation in sorted((o for b in blocks for o in b.operations), key=lambda o: o.kept_bytes / o.cost):
        part = min(1.0, left / operation.kept_bytes)
        left, bound = left - part * operation.kept_bytes, bound - part * operation.cost
    assert sum(repeated_cost(*pair) for pair in pairs) <= bound * 1.01


def of_a_block() -> BlockProfile:
    model = build("llama")
    x = torch.ones(2, LENGTH, 32, requires_grad=True)
    angles = model.config.rope(0).angles(torch.arange(LENGTH)[None])
    return profile(model.blocks[0].forward, list(model.blocks[0].parameters()), (x, angles, None), {})


def test_a_profile_says_what_the_allocator_says():
    block = of_a_block()
    model = build("llama")
    x = torch.ones(2, LENGTH, 32, requires_grad=True)
    angles = model.config.rope(0).angles(torch.arange(LENGTH)[None])
    with allocations(CPU) as found:
        out = model.blocks[0](x, angles, None)
    # The result itself is no activation of this block: it is the next one's input.
    assert found.left_bytes == block.saved_bytes - block.input_bytes + out.nbytes
    assert block.input_bytes == x.nbytes
    products = [o for o in block.operations if o.key[0] == "aten.mm"]
    assert len(products) == 6, "the last of seven products is not repeated"
    assert products[0].cost >= 2 * 2 * LENGTH * 32 * 32 and products[0].kept_bytes == 2 * LENGTH * 32 * 4


def kept_between(model, number: int) -> int:
    """Bytes that stay after the forward of a step, of which ``number`` have gone before."""
    for _ in range(number):
        gradients(model)
        for parameter in model.parameters():
            parameter.grad.zero_()
    with allocations(CPU) as found:
        loss = model(batch(), readout=lambda x, head, extra: x.sum())
    del loss
    return found.left_bytes


def test_what_stays_is_what_was_chosen(capfd):
    block = of_a_block()
    least, straight = 5 * block.input_bytes, 5 * block.saved_bytes
    operations = []
    whole = kept_between(build("llama"), 1)
    random_state = torch.get_rng_state().nbytes
    for budget in [least, *(least + (straight - least) * i // 7 for i in range(1, 7)), straight]:
        model = build("llama", "auto", budget=f"{budget}B")
        capfd.readouterr()
        for _ in range(3):
            found = gradients(model)
            assert all(torch.equal(found[key], value) for key, value in plain("llama").items())
            model.zero_grad()
        told = capfd.readouterr().err
        assert told.count("activations: blocks keep") == 1
        repeat_nothing = int(told.rpartition("; ")[2].split()[0])
        model = build("llama", "auto", budget=f"{budget}B")
        kept = kept_between(model, 2) - (5 - repeat_nothing) * random_state
        assert kept - (whole - straight) <= budget
        assert kept - (whole - straight) >= budget - block.saved_bytes // 2, "what the budget allows is used"
        operations.append(flops(model))
    assert operations == sorted(operations, reverse=True) and operations[0] > operations[-1]
    assert operations[0] == flops(build("llama", "full")) and operations[-1] == flops(build("llama"))


def test_the_first_step_takes_no_more_than_full_recomputation():
    peaks = {}
    for name, options in (("none", {}), ("full", {}), ("auto", {"budget": "1MiB"})):
        model = build("deep", name, **options)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids = torch.arange(4 * 64).view(4, 64) % 50
        with allocations(CPU) as found:
            loss = model(ids, readout=lambda x, head, extra: x.square().sum())
            loss.backward()
            del loss
        assert found.left_bytes < 10_000, name
        peaks[name] = found.peak_bytes
    assert peaks["auto"] < peaks["full"] * 1.05 < peaks["none"] / 2


def test_other_architectures_and_dropout():
    for architecture in ("gemma2", "chunked", "mixtral", "gpt2", "dropout"):
        model = build(architecture, "auto", budget="120KiB" if architecture == "gpt2" else "250KiB")
        for _ in range(3):
            found = gradients(model)
            assert all(torch.equal(found[key], value) for key, value in plain(architecture).items()), architecture
            model.zero_grad()


def test_an_impossible_budget_is_refused_with_the_least():
    model = build("llama", "auto", budget="10KiB")
    gradients(model)
    with pytest.raises(RunError, match="10 KiB is less than the 40 KiB that stay where every block is recomputed"):
        gradients(model)
    with pytest.raises(UserError, match="say how much"):
        build("llama", "auto")
    assert "llama" in MODELS
