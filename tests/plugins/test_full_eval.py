"""precision.full_eval: an evaluation on converted weights, and the weights as they were after it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from conftest import column, fw
from fw.checkpointing.placement import initialise
from fw.kinds.offload import OffloadPolicy
from fw.kinds.sharding import StepSpec
from fw.meter.allocations import allocations
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.optimizer.adamw import AdamW, AdamWConfig
from fw_plugins.precision.bf16 import BF16, BF16Config
from fw_plugins.sharding.evaluating import weights_in
from fw_plugins.sharding.single import SingleRank

CPU = torch.device("cpu")


def model(tied: bool = False) -> Llama:
    config = LlamaConfig(64, 2, 4, 2, intermediate_size=128, tie_word_embeddings=tied)
    made = Llama(config, 96, 256, SDPAttention(None))
    for name, parameter in made.named_parameters():
        initialise(parameter.data, name, made.init(name), seed=0)
    return made


def stepper_of(module: Llama, full_eval: bool):
    policy = BF16(BF16Config(full_eval=full_eval)).policy()
    return SingleRank(None).stepper(module, None, StepSpec(policy, OffloadPolicy(), AdamW(AdamWConfig(lr=1e-2)).spec(CPU)))


def ids(rows: int = 8) -> torch.Tensor:
    return torch.randint(96, (rows, 129), generator=torch.Generator().manual_seed(0))


def loss_of(module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def train(stepper) -> None:
    with stepper.forward_context():
        loss = loss_of(stepper.module, ids(2))
    stepper.backward(loss)
    stepper.step(1.0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_is_that_of_the_model_in_bf16_and_training_goes_on_as_without(tied):
    one, other = model(tied), model(tied)
    with_it, without = stepper_of(one, True), stepper_of(other, False)
    for _ in range(2):
        train(with_it)
        train(without)
        with torch.no_grad(), with_it.evaluation(), with_it.forward_context():
            loss = loss_of(with_it.module, ids())
            assert {p.dtype for m in one.modules() for p in m._parameters.values() if p is not None} == {torch.bfloat16}
        with torch.no_grad():
            assert loss.equal(loss_of(copy.deepcopy(one).to(torch.bfloat16), ids()))
            with without.evaluation(), without.forward_context():
                assert not loss.equal(loss_of(without.module, ids()))
        assert all(a.equal(b) and a.dtype == torch.float32 for a, b in zip(one.parameters(), other.parameters(), strict=True))
    state, theirs = with_it.optimizer_tensors(), without.optimizer_tensors()
    assert all(state[key].equal(theirs[key]) for key in theirs)


def test_an_evaluation_takes_fewer_bytes_beside_its_weights():
    """No copies of weights but the converted ones, and what goes from block to block has two bytes a number."""
    peaks = {}
    for full_eval in (False, True):
        stepper = stepper_of(model(), full_eval)
        with torch.no_grad(), allocations(CPU) as found, stepper.evaluation(), stepper.forward_context():
            loss_of(stepper.module, ids())
        assert found.left_bytes <= 4 * 8 * 128, "nothing of it stays"
        peaks[full_eval] = found.peak_bytes - full_eval * 2 * sum(p.numel() for p in stepper.module.parameters())
    assert peaks[False] - peaks[True] >= 2 * 8 * 128 * 64, peaks


@pytest.mark.parametrize("leave_device", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_parameters_come_back_to_the_bit(leave_device, fails):
    made = model(tied=True)
    objects, before = list(made.parameters()), [p.detach().clone() for p in made.parameters()]
    seen = []
    for parameter in objects:  # as whoever looks at gradients does
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append(1))
    try:
        with torch.no_grad(), weights_in(made, torch.bfloat16, leave_device=leave_device):
            assert all((p.untyped_storage().nbytes() == 0) == leave_device for p in objects)
            loss_of(made, ids(1))
            if fails:
                raise RuntimeError("out of something")
    except RuntimeError:
        assert fails
    assert all(a is b for a, b in zip(made.parameters(), objects, strict=True))
    assert all(a.equal(b) for a, b in zip(objects, before, strict=True))
    loss_of(made, ids(1)).backward()
    assert len(seen) == len(objects)


def test_a_failing_validation_leaves_the_weights_as_they_were(workspace, monkeypatch):
    import fw as framework
    from fw.training.module import TrainingModule

    met = {}

    def fail(module, batch, batch_idx):
        met["module"] = module
        met["during"] = {p.dtype for m in module.assembly.model.modules() for p in m._parameters.values() if p is not None}
        raise ValueError("no")

    monkeypatch.setattr(TrainingModule, "validation_step", fail)
    with pytest.raises(ValueError, match="no"):
        framework.train("tiny.yaml", "precision={name: bf16, full_eval: true}", "train.val_every=1", "train.max_steps=2")
    assert met["during"] == {torch.bfloat16}
    assert {p.dtype for p in met["module"].assembly.model.parameters()} == {torch.float32}


def test_a_run_trains_as_without_it(workspace):
    words = ["train.max_steps=6", "train.val_every=2", "train.sample_tokens=4", "launch.threads=1"]
    for name, option in (("with", "true"), ("without", "false")):
        fw("train", "tiny.yaml", f"precision={{name: bf16, full_eval: {option}}}", *words, f"train.run_dir={name}").ok()
    assert column("with", "loss") == column("without", "loss") and column("with", "grad_norm") == column("without", "grad_norm")
    validated = [(a, b) for a, b in zip(column("with", "val_loss"), column("without", "val_loss"), strict=True) if a is not None]
    assert len(validated) == 3 and all(a != b and a == pytest.approx(b, rel=2e-3) for a, b in validated)
