"""Preference optimization against plain PyTorch over transformers and peft."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import fw
from chats import PLAIN, opened, plugin, write, write_tokenizer
from conftest import column, fw as start, own_cache
from fw.cli import main
from fw.errors import UserError
from fw.kinds import make
from fw.kinds.data import IGNORED
from fw.kinds.objective import ObjectivePlugin
from fw.training.packing import PackedRows

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CONFIG = transformers.LlamaConfig(
    vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)
PAIRS = [
    {"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five, I think."},
    {"prompt": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hi"}], "chosen": "Hello", "rejected": "Go away!"},
    {
        "chosen": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B"}],
        "rejected": [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "C, D and E"}],
    },
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a random adapter, a tokenizer, and pairs."""
    monkeypatch.setenv("FW_CACHE", own_cache(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(CONFIG)
    base.save_pretrained("base")
    write_tokenizer(tmp_path / "base", PLAIN)
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained("adapter")
    write(tmp_path / "pairs.jsonl", *PAIRS)
    return tmp_path


def objective(**options: object):
    return make(ObjectivePlugin, "dpo", **options)


def rows(length: int) -> dict[str, torch.Tensor]:
    """The pairs, packed as training does."""
    samples = opened(plugin("preference", files=["pairs.jsonl"], val_files=["pairs.jsonl"], tokenizer="base"), length).train
    packed = PackedRows(samples, length)
    parts = [packed[row] for row in range(len(packed))]
    batch = {key: torch.stack([part[key] for part in parts]) for key in parts[0]}
    positions = torch.zeros_like(batch["segments"])
    for row, segments in enumerate(batch["segments"]):
        for segment in segments.unique():
            where = segments == segment
            positions[row, where] = torch.arange(int(where.sum()))
    return {**batch, "positions": positions}


def reference(options: dict[str, float]) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[float]]:
    """Sum of losses, gradients by peft's names, mean rewards; each answer by itself."""
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained("base"), "adapter", is_trainable=True)
    model.eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained("base")
    beta, kind, smoothing = options.get("beta", 0.1), options.get("loss", "sigmoid"), options.get("label_smoothing", 0.0)

    def likelihood(messages: list[dict[str, str]]) -> tuple[torch.Tensor, int]:
        whole = tokenizer.apply_chat_template(messages, return_dict=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        ids = torch.tensor([whole[:-1]])  # without the newline behind the answer
        logits = model(ids).logits[0, :-1].log_softmax(-1)
        logp = logits.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum()
        return logp, ids.shape[1] - len(prompt)

    losses, rewards = [], []
    for pair in PAIRS:
        before = pair.get("prompt", [])
        before = [{"role": "user", "content": before}] if isinstance(before, str) else before
        change = []
        for name in ("chosen", "rejected"):
            answer = pair[name] if isinstance(pair[name], list) else [*before, {"role": "assistant", "content": pair[name]}]
            policy, tokens = likelihood(answer)
            with torch.no_grad(), model.disable_adapter():
                base, _ = likelihood(answer)
            change.append((policy - base) / (tokens if kind == "ipo" else 1))
        margin = change[0] - change[1]
        rewards.append([float(beta * each.detach()) for each in change])
        if kind == "hinge":
            losses.append(torch.relu(1 - beta * margin))
        elif kind == "ipo":
            losses.append((margin - 1 / (2 * beta)) ** 2)
        else:
            losses.append(-(1 - smoothing) * F.logsigmoid(beta * margin) - smoothing * F.logsigmoid(-beta * margin))
    total = torch.stack(losses).sum()
    total.backward()
    gradients = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
    means = [sum(each[n] for each in rewards) / len(rewards) for n in (0, 1)]
    accuracy = sum(each[0] > each[1] for each in rewards) / len(rewards)
    return total.detach(), gradients, [*means, means[0] - means[1], accuracy]


@pytest.mark.parametrize("chunk", [0, 16])
@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "label_smoothing": 0.1}, {"loss": "hinge"}, {"loss": "ipo", "beta": 0.2}], ids=str)
def test_loss_rewards_and_gradients_are_those_of_plain_pytorch(here: Path, options: dict[str, float], chunk: int) -> None:
    expected, gradients, figures = reference(options)
    model = fw.load_model("base", adapter="adapter")
    adapters = model.adapters
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in adapters.added)
    batch = rows(192)
    assert batch["segments"].amax() > 2, "several pairs share a row"
    dpo = objective(chunk_tokens=chunk, **options)
    dpo.check(model, {})
    assert dpo.count(batch) == len(PAIRS)
    loss = dpo.loss_sum(model, batch)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    assert set(adapters.added) and len(gradients) == len(adapters.added)
    for name in adapters.added:
        theirs = gradients[adapters.tensors[name].name]
        assert (model.get_parameter(name).grad - theirs).norm() <= 1e-4 * theirs.norm(), name
    sums, pairs = dpo.take_figures()
    assert pairs == len(PAIRS) and dpo.take_figures() == ([0.0] * 4, 0)
    if options.get("loss") != "ipo":
        assert [total / pairs for total in sums] == pytest.approx(figures, rel=1e-4, abs=1e-6)


def test_the_reference_is_the_base(here: Path) -> None:
    """Where the adapter changes nothing, nothing is gained: log 2 for each pair, no reward."""
    model = fw.load_model("base", adapter="adapter")
    with torch.no_grad():
        for name in model.adapters.added:
            if name.endswith("lora_B"):
                model.get_parameter(name).zero_()
    dpo = objective()
    assert float(dpo.loss_sum(model, rows(192)).detach()) == pytest.approx(3 * 0.693147, rel=1e-5)


def test_pairs_are_cut_at_the_ends_of_the_longer_answer(here: Path) -> None:
    long = {"prompt": "Q", "chosen": "c" * 100, "rejected": "r"}
    write(here / "long.jsonl", long)
    data = plugin("preference", files=["long.jsonl"], val_files=["long.jsonl"], tokenizer="base")
    (whole,) = (opened(data, 512).train[0],)
    cut = data.open(100).train[0]
    first, second = (int((whole["segments"] == n).sum()) for n in (1, 2))
    assert len(cut["labels"]) == 100 and int((cut["segments"] == 2).sum()) == second < first
    kept = 100 - second
    assert torch.equal(cut["input_ids"][:kept], whole["input_ids"][:kept])
    assert torch.equal(cut["labels"][kept:], whole["labels"][first:])
    assert (whole["labels"] != IGNORED).sum() == 100 + 1 + 2, "both answers, and their ends"


def settings(**more: object) -> dict[str, object]:
    data = {"name": "preference", "files": ["pairs.jsonl"], "val_files": ["pairs.jsonl"], "tokenizer": "base"}
    train = {
        "sequence_length": 192,
        "global_batch_size": 2,
        "max_steps": 8,
        "packing": True,
        "val_every": 8,
        "log_every": 1,
        "save_every": 0,
    }
    return {
        "model": {"name": "auto", "path": "base"},
        "data": data,
        "objective": {"name": "dpo"},
        "peft": {"name": "lora"},
        "train": {**train, "save_every": 0, "sample_tokens": 0, "run_dir": "run"},
        "optimizer": {"lr": 1e-2},
        "launch": {"accelerator": "cpu"},
        **more,
    }


def test_a_run_prefers_what_was_chosen_and_tells_rewards(here: Path) -> None:
    (here / "dpo.yaml").write_text(json.dumps(settings()))
    assert main(["train", "dpo.yaml"]) == 0
    with Path("run/metrics.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert float(found[0]["loss"]) == pytest.approx(0.693147, rel=1e-5), "at first it is the reference"
    assert float(found[-1]["loss"]) < 0.5 and float(found[-1]["rewards/margin"]) > 0.5 and float(found[-1]["rewards/accuracy"]) == 1
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["val_loss"] < 0.5 and summary["val_bits_per_byte"] is None
    assert summary["figures"]["rewards/margin"] == pytest.approx(float(found[-1]["rewards/margin"]), rel=1e-4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"peft": {"name": "none"}}, "dpo compares with the model without its adapters"),
        ({"peft": {"name": "lora", "whole": ["lm_head"]}}, "trains itself"),
        ({"objective": {"name": "dpo", "beta": 0}}, "objective.beta: 0"),
        ({"data": {"name": "synthetic", "vocab_size": 64}}, "because it compares two answers to the same; use data=preference"),
        ({"objective": {"name": "causal_lm"}}, "because it would learn rejected answers as it does chosen ones; use objective=dpo"),
        ({"objective": {"name": "dpo", "loss": "hinge", "label_smoothing": 0.1}}, "objective.label_smoothing"),
    ],
)
def test_what_cannot_be_is_refused(here: Path, capsys: pytest.CaptureFixture[str], more: dict[str, object], words: str) -> None:
    (here / "dpo.yaml").write_text(json.dumps(settings(**more)))
    assert main(["train", "dpo.yaml"]) == 2
    assert words in capsys.readouterr().err


def test_records_without_two_answers(here: Path) -> None:
    write(here / "bad.jsonl", {"prompt": "x", "chosen": "y"})
    with pytest.raises(UserError, match=r"bad.jsonl:1: it has no rejected, but prompt, chosen"):
        opened(plugin("preference", files=["bad.jsonl"], tokenizer="base"))


def test_the_plan_is_what_it_takes_and_ranks_agree(here: Path) -> None:
    more = {"precision": "bf16", "train": {**settings()["train"], "val_every": 0, "max_steps": 3}}
    (here / "dpo.yaml").write_text(json.dumps(settings(**more)))
    documents = [json.loads(start("plan", "dpo.yaml", "--json").ok().out)]
    documents.append(json.loads(start("profile", "dpo.yaml", "--json", "--steps", "2", "--timed", "0").ok().out))
    planned, measured = (document["per_rank"][0]["allocated_peak_bytes"] for document in documents)
    assert abs(planned - measured) <= 256
    runs = {"one": [], "two": ["sharding=fsdp", "launch.devices=2"], "padded": ["train.packing=false"]}
    for name, overrides in runs.items():
        start("train", "dpo.yaml", f"train.run_dir={name}", *overrides).ok()
    losses, others, padded = (column(run, "loss") for run in runs)
    assert losses == pytest.approx(others, rel=2e-3), "in bf16, on one rank or two"
    assert padded[0] == pytest.approx(0.693147, rel=1e-4) and padded[-1] < padded[0]


class Uniform(torch.nn.Module):
    """Every token is as likely as any other, with adapters and without."""

    def forward(self, ids, positions_BL, segments_BL, readout):
        return readout(torch.zeros(*ids.shape, 4), lambda x: torch.zeros(*x.shape[:-1], 1000), None)


def test_a_pair_of_which_nothing_is_left_to_learn_counts_for_nothing(here: Path) -> None:
    """What it is divided by is what was summed."""
    batch = rows(256)
    whole = objective().count(batch)
    assert whole == int(batch["segments"].amax(1).sum()) // 2 > 1
    first = (batch["segments"] == 1) & (torch.arange(len(batch["segments"]))[:, None] == 0)
    cut = {**batch, "labels": batch["labels"].masked_fill(first, IGNORED)}
    assert objective().count(cut) == whole - 1
    for each in (batch, cut):
        assert float(objective().loss_sum(Uniform(), each)) == pytest.approx(objective().count(each) * math.log(2))
