"""Distillation against plain PyTorch on transformers' models; ways to compute it against each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fw
from conftest import TINY, column, fw as run_fw, metrics
from fw.assemble import assemble
from fw.config import load
from fw.errors import UserError
from fw.kinds.data import IGNORED
from fw.recipe import resolve
from fw_plugins.objective.distill import Distill, DistillConfig
from plugins.taught import IDS, labels, make_pair, mixed, of_transformers

pytest.importorskip("transformers")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return make_pair(tmp_path)


def by_hand(pair: Path, weight: float, temperature: float) -> tuple[float, dict[str, Tensor]]:
    """Hinton et al. 2015, section 2, on logits of transformers; gradients of the sum."""
    student, teacher = of_transformers(pair)
    z = student(IDS).logits
    with torch.no_grad():
        p = (teacher(IDS).logits / temperature).softmax(-1)
    q = (z / temperature).softmax(-1)
    loss = mixed(z, (p * (p.log() - q.log())).sum(-1), weight, temperature)
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in student.named_parameters()}


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("weight, temperature", [(0.5, 1.0), (1.0, 2.0), (0.3, 0.5)])
def test_loss_and_gradients_are_those_by_hand(pair: Path, weight: float, temperature: float, chunk: int) -> None:
    objective = Distill(DistillConfig(str(pair / "teacher"), weight=weight, temperature=temperature, chunk_tokens=chunk))
    objective.use(fw.load_model(pair / "teacher").requires_grad_(False))
    student = fw.load_model(pair / "student").train()
    loss = objective.loss_sum(student, {"input_ids": IDS, "labels": labels()})
    loss.backward()
    expected, gradients = by_hand(pair, weight, temperature)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    for name, parameter in student.named_parameters():
        (of,) = student.hf_tensors(name)
        assert torch.allclose(parameter.grad, gradients[of.name], atol=1e-4 * float(gradients[of.name].abs().max())), name
    (divergence, entropy), tokens = objective.take_figures()
    assert tokens == int((labels() != IGNORED).sum()) and objective.take_figures() == ([0.0, 0.0], 0)
    assert weight * temperature**2 * divergence + (1 - weight) * entropy == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_hidden_states_come_nearer(tmp_path: Path, weight: float, chunk: int) -> None:
    """What transformers' heads see, of both."""
    pair = make_pair(tmp_path, (32, 32))
    objective = Distill(DistillConfig(str(pair / "teacher"), weight=weight, hidden_weight=3.0, chunk_tokens=chunk))
    objective.use(fw.load_model(pair / "teacher").requires_grad_(False))
    student = fw.load_model(pair / "student").train()
    loss = objective.loss_sum(student, {"input_ids": IDS, "labels": labels()})
    loss.backward()
    theirs, teacher = of_transformers(pair)
    seen, wanted = (model(IDS, output_hidden_states=True).hidden_states[-1] for model in (theirs, teacher))
    distance = ((seen - wanted.detach()).square().mean(-1) * (labels() != IGNORED)).sum()
    expected, gradients = by_hand(pair, weight, 1.0)
    (3.0 * distance).backward()
    assert float(loss) == pytest.approx(expected + 3.0 * float(distance), rel=1e-5)
    others = dict(theirs.named_parameters())
    for name, parameter in student.named_parameters():
        (of,) = student.hf_tensors(name)
        whole = gradients[of.name] + (0 if others[of.name].grad is None else others[of.name].grad)
        assert torch.allclose(parameter.grad, whole, atol=1e-4 * float(whole.abs().max())), name
    (_, _, hidden), _ = objective.take_figures()
    assert hidden == pytest.approx(float(distance), rel=1e-5) and objective.figures[-1] == "distill/hidden"


def test_a_student_that_is_its_teacher_has_nothing_to_learn(pair: Path) -> None:
    objective = Distill(DistillConfig(str(pair / "student"), weight=1.0))
    objective.use(fw.load_model(pair / "student").requires_grad_(False))
    student = fw.load_model(pair / "student").train()
    loss = objective.loss_sum(student, {"input_ids": IDS, "labels": labels()})
    loss.backward()
    assert abs(float(loss)) < 1e-4 and all(parameter.grad.abs().max() < 1e-4 for parameter in student.parameters())


def test_validation_is_of_the_next_token(pair: Path) -> None:
    objective = Distill(DistillConfig(str(pair / "teacher")))
    objective.use(fw.load_model(pair / "teacher"))
    student = fw.load_model(pair / "student")
    with torch.no_grad():
        found = objective.loss_sum(student, {"input_ids": IDS, "labels": labels()})
        expected = F.cross_entropy(student(IDS).flatten(0, 1), labels().flatten(), ignore_index=IGNORED, reduction="sum")
    assert torch.allclose(found, expected)


@pytest.fixture
def taught(workspace: Path) -> Path:
    """``tiny.yaml`` beside a teacher of the same tokens."""
    config = resolve(load("tiny.yaml", []))
    made = assemble(config, 257, None, torch.device("cpu"))
    fw.save_model(made.model, workspace / "teacher")
    return workspace


DISTILL = "objective={name: distill, teacher: teacher}"
SMALLER = ("model.num_hidden_layers=1", "train.max_steps=3")


@pytest.mark.parametrize("sharding", ["ddp", "fsdp", "{name: zero, stage: 2}", "{name: zero, stage: 3}"])
@pytest.mark.slow
def test_every_sharding_teaches_the_same(taught: Path, sharding: str) -> None:
    if "zero" in sharding:
        pytest.importorskip("deepspeed")
    for chunk in (0, 24):
        words = ("train", "tiny.yaml", DISTILL, f"objective.chunk_tokens={chunk}", *SMALLER)
        run_fw(*words, f"train.run_dir=one{chunk}").ok()
        run_fw(*words, f"sharding={sharding}", "launch.devices=2", f"train.run_dir=two{chunk}").ok()
        for name in ("loss", "grad_norm", "distill/kl", "distill/cross_entropy"):
            one, two = column(f"one{chunk}", name), column(f"two{chunk}", name)
            assert len(one) == 3 and two == pytest.approx(one, rel=1e-4), (name, chunk)
    assert column("one0", "loss") == pytest.approx(column("one24", "loss"), rel=1e-4)
    assert metrics("one0")


def test_what_does_not_fit_is_refused(taught: Path) -> None:
    def refused(*words: str) -> str:
        found = run_fw("train", "tiny.yaml", *words)
        assert found.code == 2, found.err
        return found.err.splitlines()[-1]

    assert "objective.teacher: teacher has 257 tokens, this model 300" in refused(DISTILL, "model.vocab_size=300")
    assert "sharding.tensor: ranks would have parts of the vocabulary" in refused(
        DISTILL, "sharding={name: fsdp, tensor: 2}", "launch.devices=2"
    )
    assert "nowhere" in refused("objective={name: distill, teacher: nowhere}")
    assert "hidden states of the teacher have 64 numbers, this model's 32" in refused(
        DISTILL, "objective.hidden_weight=1", "model.hidden_size=32"
    )
    with pytest.raises(UserError, match="weight"):
        DistillConfig("teacher", weight=0.0)
    with pytest.raises(UserError, match="hold no hidden states"):
        DistillConfig("teacher", hidden_weight=1.0, answers="answers")
    assert TINY
