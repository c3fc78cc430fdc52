"""A teacher's answers in files: what training makes of them, by hand and beside the teacher itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fw
from conftest import column, fw as run_fw
from fw.assemble import assemble
from fw.config import load
from fw.errors import UserError
from fw.kinds.data import IGNORED
from fw.recipe import resolve
from fw_plugins.objective.answers import AnswerFiles, AnswerWriter, row_keys
from fw_plugins.objective.distill import Distill, DistillConfig
from plugins.taught import IDS, VOCABULARY, labels, make_pair, mixed, of_transformers

pytest.importorskip("transformers")


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return make_pair(tmp_path)


def answered(pair: Path, **options: float) -> Distill:
    """An objective whose teacher has been asked about :data:`IDS`."""
    objective = Distill(DistillConfig(str(pair / "teacher"), answers=str(pair / "answers"), **options))
    objective.answer(fw.load_model(pair / "teacher"), [{"input_ids": IDS[:2]}, {"input_ids": IDS[2:]}])
    assert objective.beside is None and objective.ahead is not None
    return objective


def by_hand(pair: Path, weight: float, temperature: float, top_k: int) -> tuple[float, dict[str, Tensor]]:
    """KL over the k most likely tokens of the teacher and all others as one."""
    student, teacher = of_transformers(pair)
    z = student(IDS).logits
    with torch.no_grad():
        p = (teacher(IDS).logits / temperature).softmax(-1)
        p, chosen = p.sort(-1, descending=True)
        p = torch.cat([p[..., :top_k], p[..., top_k:].sum(-1, keepdim=True)], -1)
    q = (z / temperature).softmax(-1).gather(-1, chosen)
    q = torch.cat([q[..., :top_k], q[..., top_k:].sum(-1, keepdim=True)], -1)
    loss = mixed(z, (p * (p.log() - q.log())).sum(-1), weight, temperature)
    loss.backward()
    return float(loss), {name: parameter.grad for name, parameter in student.named_parameters()}


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("weight, temperature, top_k", [(0.5, 1.0, 5), (1.0, 2.0, 1), (0.3, 0.5, VOCABULARY - 1)])
def test_loss_and_gradients_are_those_by_hand(pair: Path, weight: float, temperature: float, top_k: int, chunk: int) -> None:
    """But for what 16 bits of a probability's logarithm round away."""
    objective = answered(pair, weight=weight, temperature=temperature, top_k=top_k, chunk_tokens=chunk)
    student = fw.load_model(pair / "student").train()
    loss = objective.loss_sum(student, {"input_ids": IDS, "labels": labels()})
    loss.backward()
    expected, gradients = by_hand(pair, weight, temperature, top_k)
    assert float(loss) == pytest.approx(expected, rel=1e-3)
    for name, parameter in student.named_parameters():
        (of,) = student.hf_tensors(name)
        assert torch.allclose(parameter.grad, gradients[of.name], atol=2e-3 * float(gradients[of.name].abs().max())), name


def test_rows_are_known_by_what_they_are(pair: Path) -> None:
    """In any order, beside any other, however they are padded; not if other tokens see each other."""
    objective = answered(pair, top_k=5)
    student = fw.load_model(pair / "student").train()
    expected = float(objective.loss_sum(student, {"input_ids": IDS, "labels": labels()}))
    padded = torch.nn.functional.pad(IDS, (0, 4))
    segments = torch.nn.functional.pad(torch.ones_like(IDS), (0, 4))
    moved = torch.nn.functional.pad(labels(), (0, 4), value=IGNORED)
    batch = {"input_ids": padded.flip(0), "labels": moved.flip(0), "segments": segments.flip(0)}
    assert float(objective.loss_sum(student, batch)) == pytest.approx(expected, rel=1e-5)
    batch["segments"][0, 3:16] = 2
    with pytest.raises(UserError, match="none for a row of this run"):
        objective.loss_sum(student, batch)


def test_only_padding_has_no_answers_and_needs_none(pair: Path) -> None:
    objective = answered(pair, top_k=5)
    student = fw.load_model(pair / "student").train()
    nothing = torch.zeros_like(IDS[:1])
    loss = objective.loss_sum(student, {"input_ids": nothing, "labels": nothing - 100, "segments": nothing})
    loss.backward()
    assert float(loss) == 0 and all(parameter.grad.abs().max() == 0 for parameter in student.parameters())


def test_segments_number_documents_and_nothing_more() -> None:
    one, other = torch.tensor([[1, 1, 2, 2, 0]]), torch.tensor([[4, 4, 7, 7, 0]])
    ids = IDS[:1, :5]
    assert row_keys({"input_ids": ids, "segments": one}) == row_keys({"input_ids": ids, "segments": other})
    assert row_keys({"input_ids": ids, "segments": one}) != row_keys({"input_ids": ids, "segments": torch.tensor([[1, 1, 1, 1, 0]])})
    assert row_keys({"input_ids": ids})[1] == [5] and row_keys({"input_ids": ids, "segments": one})[1] == [4]


def test_what_was_answered_before_an_interruption_is_kept(pair: Path) -> None:
    asked = []

    class Teacher(torch.nn.Module):
        vocab_size = VOCABULARY

        def forward(self, ids: Tensor, *words: object, **more: object) -> Tensor:
            asked.append(len(ids))
            return teacher(ids, *words, **more)

    def interrupted() -> Iterator[Mapping[str, Tensor]]:
        yield {"input_ids": IDS[:2]}
        raise KeyboardInterrupt

    teacher = fw.load_model(pair / "teacher")
    objective = Distill(DistillConfig(str(pair / "teacher"), answers=str(pair / "answers"), top_k=5))
    with pytest.raises(KeyboardInterrupt):
        objective.answer(Teacher(), interrupted())
    objective.answer(Teacher(), [{"input_ids": IDS[:2]}, {"input_ids": IDS[2:]}])
    objective.answer(Teacher(), [{"input_ids": IDS}])
    assert asked == [2, 1], "each row once"
    assert len(list((pair / "answers").glob("part-*"))) == 2


def test_answers_are_of_one_teacher_and_one_writer(pair: Path) -> None:
    objective = answered(pair, top_k=5)
    asked = objective._asked(VOCABULARY)
    first = AnswerWriter(pair / "answers", asked)
    with pytest.raises(UserError, match="another process writes"):
        AnswerWriter(pair / "answers", asked)
    first.close()
    weights = next((pair / "teacher").glob("*.safetensors"))
    moved = load_file(weights)
    head = moved["lm_head.weight"]
    head[len(head) // 2, 3] += 1e-3  # far from either end of the file
    save_file(moved, weights, metadata={"format": "pt"})
    with pytest.raises(UserError, match="given by other weights"):
        objective.answer(fw.load_model(pair / "teacher"), [{"input_ids": IDS}])
    shutil.rmtree(pair / "teacher")
    AnswerFiles(pair / "answers", objective._asked(VOCABULARY))
    part = next((pair / "answers").glob("part-*"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(UserError, match="is damaged"):
        AnswerFiles(pair / "answers", objective._asked(VOCABULARY))


DISTILL = "objective={name: distill, teacher: teacher, weight: 0.9}"
KEPT = "objective={name: distill, teacher: teacher, weight: 0.9, answers: answers, top_k: 256}"
SMALLER = ("model.num_hidden_layers=1", "train.max_steps=4")


@pytest.fixture
def taught(workspace: Path) -> Path:
    """``tiny.yaml`` beside a teacher of the same tokens."""
    made = assemble(resolve(load("tiny.yaml", [])), 257, None, torch.device("cpu"))
    fw.save_model(made.model, workspace / "teacher")
    return workspace


@pytest.mark.parametrize("data", ["rows", "padded", "packed"])
def test_a_run_needs_no_teacher_any_more(taught: Path, data: str) -> None:
    """Its losses are those beside the teacher, for which all tokens but one are kept; on two ranks too."""
    overrides = {"rows": [], "padded": ["data.samples=documents"], "packed": ["data.samples=documents", "train.packing=true"]}[data]
    run_fw("train", "tiny.yaml", DISTILL, *SMALLER, *overrides, "train.run_dir=with").ok()
    told = run_fw("data", "teach", "tiny.yaml", KEPT, *SMALLER, *overrides).ok()
    assert told.out == "32 rows are answered\n"
    shutil.move("teacher", "elsewhere")
    if data == "rows":
        planned = json.loads(run_fw("plan", "tiny.yaml", KEPT, *SMALLER, "--json").ok().out)["per_rank"][0]
        measured = json.loads(run_fw("profile", "tiny.yaml", KEPT, *SMALLER, "--timed", "0", "--json").ok().out)["per_rank"][0]
        assert planned["allocated_peak_bytes"] == pytest.approx(measured["allocated_peak_bytes"], abs=2048)
    for run, more in (("one", []), ("two", ["sharding=fsdp", "launch.devices=2"])):
        run_fw("train", "tiny.yaml", KEPT, *SMALLER, *overrides, *more, f"train.run_dir={run}").ok()
        for name in ("loss", "distill/kl", "distill/cross_entropy"):
            assert column(run, name) == pytest.approx(column("with", name), rel=2e-3, abs=2e-5), name


def test_what_does_not_fit_is_refused(taught: Path) -> None:
    def refused(verb: str, *words: str) -> str:
        found = run_fw(*verb.split(), "tiny.yaml", *SMALLER, *words)
        assert found.code == 2 and "Traceback" not in found.err, found.err
        return found.err.splitlines()[-1]

    assert "answers.json is not there" in refused("train", KEPT)
    assert "asks no model ahead" in refused("data teach", DISTILL)
    assert "asks no model ahead" in refused("data teach", "objective=causal_lm")
    assert "objective.top_k: 257 is not below the 257 tokens" in refused("data teach", KEPT, "objective.top_k=257")
    run_fw("data", "teach", "tiny.yaml", KEPT, *SMALLER).ok()
    assert "given with temperature=1.0, the config means 2.0" in refused("train", KEPT, "objective.temperature=2.0")
    assert "given with top_k=256, the config means 8" in refused("data teach", KEPT, "objective.top_k=8")
    assert "none for a row of this run" in refused("train", KEPT, "train.seed=7")
    assert "sharding.context: answers are looked up by whole rows" in refused(
        "train", KEPT, "sharding={name: fsdp, context: 2}", "launch.devices=2"
    )
