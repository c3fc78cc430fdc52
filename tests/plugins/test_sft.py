"""Objective sft: of a conversation the answers alone, against transformers' loss of the same; data without answers is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

import fw
from chats import MARKED, PLAIN, opened, plugin, write, write_tokenizer
from conftest import column, fw as run_fw, own_cache
from fw.kinds import make
from fw.kinds.objective import ObjectivePlugin
from models.architectures import CASES, save

transformers = pytest.importorskip("transformers")

CHATS = [
    [
        {"role": "user", "content": f"{n} and {n}?"},
        {"role": "assistant", "content": f"{2 * n}."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes" * (n % 3 + 1)},
    ]
    for n in range(12)
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FW_CACHE", own_cache(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "tokenizer", PLAIN)
    write(tmp_path / "chats.jsonl", *({"messages": chat} for chat in CHATS))
    write(tmp_path / "pairs.jsonl", *({"prompt": f"{n}+{n}=", "completion": str(2 * n)} for n in range(40)))
    write(tmp_path / "texts.jsonl", *({"text": f"number {n}"} for n in range(40)))
    (tmp_path / "corpus.txt").write_text("\n\n".join(f"Paragraph {n}." * 20 for n in range(40)))
    tree = {
        "model": {"name": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48},
        "data": {"name": "chat", "files": ["chats.jsonl"], "val_files": ["chats.jsonl"], "tokenizer": "tokenizer"},
        "objective": "sft",
        "optimizer": {"name": "adamw", "lr": 1e-2},
        "train": {"max_steps": 4, "global_batch_size": 4, "sequence_length": 128, "val_every": 0, "save_every": 0, "sample_tokens": 0},
        "launch": {"accelerator": "cpu"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    return tmp_path


@pytest.mark.parametrize("chunk_tokens", [0, 16])
def test_loss_and_gradients_are_transformers_of_its_assistant_mask(here: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int) -> None:
    monkeypatch.setitem(CASES, "llama", {**CASES["llama"], "vocab_size": 260})
    theirs, ours = save("llama", here / "model"), fw.load_model(here / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tokenizer(here / "marked", MARKED))
    corpus = opened(plugin("chat", files=["chats.jsonl"], val_files=["chats.jsonl"], tokenizer="tokenizer"))
    objective = make(ObjectivePlugin, "sft", chunk_tokens=chunk_tokens)
    objective.check_data(corpus)
    for number in range(2):
        chat = tokenizer.apply_chat_template(CHATS[number], return_assistant_tokens_mask=True, return_dict=True, return_tensors="pt")
        labels = torch.where(torch.as_tensor(chat["assistant_masks"]).reshape(1, -1).bool(), chat["input_ids"], -100)
        expected = theirs(input_ids=chat["input_ids"], labels=labels).loss
        batch = {key: value[None] for key, value in corpus.train[number].items()}
        ours.train()
        found = objective.loss_sum(ours, batch) / objective.count(batch)
        assert objective.count(batch) == int((labels != -100).sum()) < batch["labels"].numel()
        assert torch.allclose(found, expected, rtol=1e-5)
        for model, loss in ((ours, found), (theirs, expected)):
            model.zero_grad()
            loss.backward()
        for name, parameter in ours.named_parameters():
            (stored,) = ours.hf_tensors(name)
            assert torch.allclose(parameter.grad, theirs.get_parameter(stored.name).grad, atol=1e-5), name


@pytest.mark.parametrize("packing", ["true", "false"])
def test_runs_are_those_of_causal_lm_on_the_same_answers(here: Path, packing: str) -> None:
    run_fw("train", "run.yaml", f"train.packing={packing}", "train.run_dir=answers").ok()
    run_fw("train", "run.yaml", f"train.packing={packing}", "train.run_dir=usual", "objective=causal_lm").ok()
    assert column("answers", "loss") == column("usual", "loss") and column("answers", "loss")[-1] < column("answers", "loss")[0]
    run_fw("train", "run.yaml", f"train.packing={packing}", "train.run_dir=all", "objective=causal_lm", "data.learn=all").ok()
    assert column("all", "loss") != column("usual", "loss")


WHAT_HAS = "use data=chat, or data=jsonl with prompt and completion, both without learn=all; to learn every token, objective=causal_lm"
JSONL = {"name": "jsonl", "files": ["pairs.jsonl"], "tokenizer": "tokenizer"}
REFUSED = {
    "text": ({"name": "text", "files": ["corpus.txt"], "tokenizer": "byte"}, "'sft' does not work with data 'text', because nothing"),
    "ids": ({"name": "synthetic", "vocab_size": 260}, "'sft' does not work with data 'synthetic', because nothing"),
    "texts": ({**JSONL, "files": ["texts.jsonl"]}, "data.name: of these samples every token is learnt"),
    "learn all of prompts": ({**JSONL, "learn": "all"}, "data.name: of these samples every token is learnt"),
    "learn all of chats": ({"learn": "all"}, "data.name: of these samples every token is learnt"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_data_without_answers_is_refused(here: Path, what: str) -> None:
    data, sentence = REFUSED[what]
    tree = yaml.safe_load(Path("run.yaml").read_text())
    Path("run.yaml").write_text(yaml.safe_dump({**tree, "data": data if "name" in data else {**tree["data"], **data}}))
    for verb in ("train", "plan"):
        refused = run_fw(verb, "run.yaml")
        assert refused.code == 2 and sentence in refused.err and WHAT_HAS in refused.err, refused.err
        assert len([line for line in refused.err.splitlines() if "error" in line]) == 1
    assert not Path("runs").exists()
    run_fw("train", "run.yaml", "objective=causal_lm", "train.max_steps=1").ok()


def test_preferences_are_refused_as_by_causal_lm(here: Path) -> None:
    write(here / "preferences.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    tree = yaml.safe_load(Path("run.yaml").read_text())
    tree["data"] = {"name": "preference", "files": ["preferences.jsonl"], "tokenizer": "tokenizer"}
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    assert "it would learn rejected answers as it does chosen ones" in run_fw("train", "run.yaml").err


def test_prompts_and_texts_may_stand_side_by_side(here: Path) -> None:
    """A record that is all answer is no reason to refuse, wherever it stands."""
    tree = yaml.safe_load(Path("run.yaml").read_text())
    tree["data"] = {**JSONL, "files": ["texts.jsonl", "pairs.jsonl"]}
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    run_fw("train", "run.yaml", "train.max_steps=1").ok()
