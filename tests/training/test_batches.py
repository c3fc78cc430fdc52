"""What training reads of documents of varying length: losses and gradients of each by itself, within the bounds that are set."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from conftest import fw
from fw.checkpointing.placement import initialise
from fw.config import LoaderSection, load
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.model import ModelPlugin
from fw.meter.allocations import allocations
from fw.meter.flops import ModelFlops
from fw.recipe import World, resolve
from fw.training.batches import Source, TrainPlans, arrange
from fw.training.loading import loader
from fw.training.micro_batches import Limit, Padding
from fw.training.order import StepOrder
from fw.training.packing import PackedRows
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.objective.causal_lm import CausalLMConfig, CausalLMObjective

VOCABULARY, LONGEST = 61, 80
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
ARCHITECTURES = {
    "llama": SMALL,
    "mistral": {**SMALL, "sliding_window": 9},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
}
OBJECTIVE = CausalLMObjective(CausalLMConfig())


class Documents:
    def __init__(self, lengths):
        self.lengths = np.asarray(lengths)
        chance = torch.Generator().manual_seed(0)
        self._ids = [torch.randint(VOCABULARY, (int(length) + 1,), generator=chance) for length in self.lengths]

    def __len__(self):
        return len(self._ids)

    def __getitem__(self, index):
        return {"input_ids": self._ids[index][:-1], "labels": self._ids[index][1:]}


def build(name, **more):
    with torch.device("meta"):
        model = make(ModelPlugin, name, **{**ARCHITECTURES[name], **more}).build(VOCABULARY, LONGEST, SDPAttention(None))
    model.materialise(torch.device("cpu"))
    for parameter, tensor in model.stored().items():
        initialise(tensor.data, parameter, model.init(parameter), seed=0)
    return model.train()


def one_by_one(model, documents, indices):
    """Loss and gradients of whole documents, each alone and without padding."""
    total = 0.0
    for index in indices:
        sample = documents[index]
        loss = F.cross_entropy(model(sample["input_ids"][None])[0].float(), sample["labels"], reduction="sum")
        loss.backward()
        total += float(loss.detach())
    return total, take_gradients(model)


def take_gradients(model):
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return gradients


def steps(source, limit, batch, replicas=1, count=1):
    """For each step the micro-batches of all replicas."""
    readers = []
    for replica in range(replicas):
        plans = TrainPlans(source, StepOrder(len(source.samples), batch, 0, 0), limit, replica, replicas)
        readers.append(iter(loader(source, plans, LoaderSection(), torch.device("cpu"))))
    for _ in range(count):
        yield [next(reader) for reader in readers]


LENGTHS = [13, 1, 70, 22, 5, 5, 41, 17, 8, 80, 2, 33]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("way", ["packed", "padded", "tokens", "packed, tokens"])
def test_loss_and_gradients_are_those_of_the_documents_one_by_one(name, way):
    documents, model = Documents(LENGTHS), build(name)
    if way.startswith("packed"):
        rows = PackedRows(documents, LONGEST)
        source = Source(rows, np.full(len(rows), LONGEST), None)
    else:
        source = Source(documents, documents.lengths, Padding(8, LONGEST))
    limit = Limit(tokens=2 * LONGEST) if way.endswith("tokens") else Limit(rows=2)
    batch = len(source.samples) - len(source.samples) % 2
    (replicas,) = steps(source, limit, batch, replicas=2)
    total, targets = 0.0, 0
    for micro in (micro for each in replicas for micro in each.micro_batches):
        assert micro["input_ids"].shape[1] <= LONGEST and micro["input_ids"].shape[1] % 8 == 0
        loss = OBJECTIVE.loss_sum(model, micro)
        loss.backward()
        total, targets = total + float(loss.detach()), targets + OBJECTIVE.count(micro)
    found = take_gradients(model)
    (indices,) = islice(iter(StepOrder(len(source.samples), batch, 0, 0)), 1)
    whole = np.concatenate([rows.members(int(row)) for row in indices]) if way.startswith("packed") else indices
    expected, gradients = one_by_one(model, documents, whole.tolist())
    assert targets == documents.lengths[whole].sum() == replicas[0].lengths.sum()
    assert total == pytest.approx(expected, rel=1e-5)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=2e-4, msg=parameter)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("tokens", [LONGEST, 3 * LONGEST, 1000])
def test_no_micro_batch_is_above_the_tokens_and_a_step_has_its_samples(tokens, replicas):
    documents = Documents(np.random.default_rng(0).integers(1, LONGEST + 1, 50))
    source = Source(documents, documents.lengths, Padding(8, LONGEST))
    order = iter(StepOrder(50, 12, 0, 0))
    for found in steps(source, Limit(tokens=tokens), 12, replicas, 10):
        assert len({len(batch.micro_batches) for batch in found}) == 1
        micro_batches = [micro for batch in found for micro in batch.micro_batches]
        assert max(micro["input_ids"].numel() for micro in micro_batches) <= tokens
        rows = [row[mask > 0].tolist() for micro in micro_batches for row, mask in zip(micro["input_ids"], micro["segments"], strict=True)]
        assert sorted(filter(None, rows)) == sorted(documents[index]["input_ids"].tolist() for index in next(order))


def test_an_empty_micro_batch_gives_nothing():
    """Three samples for two replicas with two turns: one turn of one replica is padding."""
    model, documents = build("llama"), Documents([80, 80, 80])
    for padding in (None, Padding(16, LONGEST)):
        source = Source(documents, documents.lengths, padding)
        ((_, second),) = steps(source, Limit(tokens=80), 3, 2)
        empty = second.micro_batches[-1]
        assert empty["input_ids"].shape == ((1, 16) if padding else (1, 80)) and OBJECTIVE.count(empty) == 0
        assert ("segments" in empty) == (padding is not None)
        loss = OBJECTIVE.loss_sum(model, empty)
        loss.backward()
        assert float(loss.detach()) == 0 and all(not gradient.any() for gradient in take_gradients(model).values())


def test_memory_is_bounded_by_tokens_also_where_one_document_is_long():
    """By the allocator's events: a step with an outlier, against one micro-batch that is full, and against one batch of all."""
    model = build("llama")
    documents = Documents([10] * 31 + [80])

    def peak(limit):
        source = Source(documents, documents.lengths, Padding(8, LONGEST))
        ((batch,),) = steps(source, limit, 32)
        with allocations(torch.device("cpu")) as found:
            for micro in batch.micro_batches:
                OBJECTIVE.loss_sum(model, micro).backward()
        take_gradients(model)
        return found.peak_bytes

    full = Source(Documents([80] * 2), np.full(2, 80), Padding(8, LONGEST))
    ((batch,),) = steps(full, Limit(tokens=160), 2)
    (micro,) = batch.micro_batches
    with allocations(torch.device("cpu")) as bound:
        OBJECTIVE.loss_sum(model, micro).backward()
    gradients = sum(gradient.nbytes for gradient in take_gradients(model).values())
    assert peak(Limit(tokens=160)) <= bound.peak_bytes + gradients
    assert peak(Limit(rows=32)) > 5 * (bound.peak_bytes + gradients)


def test_flops_are_those_of_the_documents():
    """Against the model's own formula, document by document; and a window bends the line."""
    for name, windows in (("llama", {}), ("mistral", {"sliding_window": 9})):
        model = build(name, **windows)
        lengths = np.array(LENGTHS)
        expected = sum(length * model.flops_per_token(length) for length in LENGTHS)
        assert ModelFlops.of(model, LONGEST).for_sequences(lengths) == pytest.approx(expected, rel=1e-12)


def recipe_and_corpus(*overrides, ranks=1):
    world = World(size=ranks, rank=0, local_size=ranks, launched=ranks > 1)
    recipe = resolve(load("tiny.yaml", ["train.sequence_length=96", *overrides]), world)
    recipe.data.prepare(lambda text: None)
    return recipe, recipe.data.open(96)


DOCUMENTS = "data.samples=documents"


@pytest.mark.parametrize("more", [[], ["train.packing=true"], ["train.length_bucketing=3"], ["train.max_tokens_per_batch=200"]])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_document_is_seen_once_in_an_epoch(workspace, more, ranks):
    micro = ["train.micro_batch_size=null"] * ("tokens" in str(more))
    recipe, corpus = recipe_and_corpus(DOCUMENTS, *more, *micro, *["sharding=ddp"] * (ranks > 1), ranks=ranks)
    batches = arrange(recipe, corpus, lambda text: None)
    epoch, batch = len(batches.train.samples), recipe.train.global_batch_size
    plans = [batches.train_plans(0, replica) for replica in range(ranks)]
    seen, tokens = [], 0
    for several in zip(*plans, strict=True):
        there = sorted(index for plan in several for group in plan.micro_batches for index in group)
        assert len(there) == batch and all((plan.lengths == several[0].lengths).all() for plan in several)
        if len(seen) + batch > epoch:
            break
        seen, tokens = seen + there, tokens + several[0].lengths.sum()
    rest = epoch - len(seen)  # in the step that two epochs share
    missing = set(range(epoch)) - set(seen)
    assert len(set(seen)) == len(seen) and len(missing) == rest and missing <= set(there)
    if batches.rows.vary:
        assert tokens == corpus.train.lengths[seen].sum()
    else:
        members = np.concatenate([batches.train.samples.members(row) for row in range(epoch)])
        assert sorted(members) == list(range(len(corpus.train)))
    validated = [index for replica in range(ranks) for plan in batches.val_plans(replica) for index in plan.micro_batches[0]]
    assert sorted(validated) == list(range(len(batches.val.samples)))
    assert len({len(batches.val_plans(replica)) for replica in range(ranks)}) == 1


def test_rows_of_the_run_are_known_and_packing_is_told(workspace):
    said: list[str] = []
    for overrides, vary, segments in (
        ([], False, False),
        (["data.isolate_documents=true"], False, True),
        ([DOCUMENTS], True, True),
        ([DOCUMENTS, "train.packing=true"], False, True),
    ):
        recipe, corpus = recipe_and_corpus(*overrides)
        rows = arrange(recipe, corpus, said.append).rows
        assert (rows.vary, rows.segments) == (vary, segments)
    (line,) = said
    packed = PackedRows(corpus.train, 96)
    assert f"training {len(corpus.train)} samples in {len(packed)} rows of 96 tokens, {packed.padding:.1%} of them padding" in line


@pytest.mark.parametrize("option", ["train.packing=true", "train.length_bucketing=2"])
def test_what_is_for_varying_samples_is_refused_for_others(workspace, option):
    with pytest.raises(
        UserError, match=rf"override {option}: {option.split('=')[0]}: the samples of data=text all have .*data.samples=doc"
    ):
        arrange(*recipe_and_corpus(option), print)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["activation={name: auto, budget: 1GiB}"], "activation: auto chooses for rows of one length, and those of this run vary"),
        (
            ["optimizer.in_backward=true", "train.gradient_clip_norm=0", "train.micro_batch_size=null", "train.max_tokens_per_batch=200"],
            "accumulates gradients over micro-batches (train.micro_batch_size, train.max_tokens_per_batch)",
        ),
        (
            ["sharding={name: fsdp, context: 2, context_method: ring}", "launch.devices=2"],
            "sharding.context_method: ring sees all of a row, and the rows of this run hold several documents or padding; use heads",
        ),
    ],
)
def test_what_cannot_work_with_them_is_refused_before_ranks_start(workspace, overrides, says):
    done = fw("train", "tiny.yaml", DOCUMENTS, *overrides)
    assert done.code == 2 and says in done.err and not (workspace / "run").exists()


def test_rows_are_multiples_of_what_the_mesh_divides(workspace):
    for options, ranks, multiple in (("context: 3", 3, 192), ("context: 3, context_method: ring", 3, 192), ("tensor: 2", 2, 64)):
        recipe = resolve(
            load("tiny.yaml", ["train.sequence_length=384", f"sharding={{name: fsdp, {options}}}"]), World(ranks, 0, ranks, launched=True)
        )
        batches = arrange(recipe, SimpleNamespace(train=Documents(LENGTHS), val=Documents(LENGTHS)), print)
        assert batches.train.padding == Padding(multiple, 384)
