"""A directory in which the commands of documents and configs can be typed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fw
from conftest import REPOSITORY, fw as run_fw
from fw.tokenizer import load_tokenizer

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@contextmanager
def desk_at(place: Path, cache: Path) -> Iterator[Path]:
    """With what the commands name: configs, a run, what was pruned of it, pairs, and the shape of an 8 B model."""
    patch = pytest.MonkeyPatch()
    patch.chdir(place)
    patch.setenv("FW_CACHE", str(cache))
    try:
        Path("configs").symlink_to(REPOSITORY / "configs")
        one_step = ["train.max_steps=1", "train.val_every=0", "train.save_every=1", "train.sample_tokens=0"]
        fw.train("configs/quickstart.yaml", *one_step, "train.run_dir=first")
        load_tokenizer("first/checkpoints/latest").save(Path("tokenizer"))
        settings = json.loads(Path("tokenizer/tokenizer_config.json").read_text())
        template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        Path("tokenizer/tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
        fw.train("configs/quickstart.yaml", *one_step, "data.tokenizer=tokenizer")
        run_fw("prune", "runs/quickstart", "--to", "shallow", "--layers", "3", "--samples", "2", "--length", "64").ok()
        pair = {"chosen": "This one.", "rejected": "That one."}
        Path("pairs.jsonl").write_text("".join(json.dumps({**pair, "prompt": f"Which of {n}?"}) + "\n" for n in range(400)))
        model = Path("meta-llama/Llama-3.1-8B-Instruct")
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(LLAMA_8B))
        load_tokenizer("tokenizer").save(model)
        yield place
    finally:
        patch.undo()


def furnish() -> None:
    """Add what pages name beyond that: more runs, directories of models, people's own texts, questions and keys."""
    one_step = ["train.max_steps=1", "train.val_every=0", "train.save_every=1", "train.sample_tokens=0"]
    tuned = ["model={name: auto, path: runs/quickstart}", "data.tokenizer=tokenizer", "peft={name: lora, rank: 4, targets: [all-linear]}"]
    fw.train("configs/quickstart.yaml", *one_step, *tuned, "train.run_dir=runs/poems")
    fw.train("configs/quickstart.yaml", *one_step, "data.tokenizer=tokenizer", "train.ema_decay=0.9", "train.run_dir=runs/smooth")
    run_fw("checkpoint", "export", "runs/quickstart", "--to", "in-16-bits", "--dtype", "bf16").ok()
    for name in ("path/to/model", "my/model", "base", "MODEL", "DIRECTORY"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(Path("in-16-bits").resolve())
    for name, run in {"runs/one": "first", "runs/other": "runs/quickstart"}.items():
        Path(name).symlink_to(Path(run).resolve())
    Path("docs").symlink_to(REPOSITORY / "docs")
    for directory in ("notes", "my/notes", "nvme", "typed", "tasks"):
        Path(directory).mkdir(parents=True)
    for directory in ("notes", "my/notes"):
        Path(directory, "one.md").write_text((REPOSITORY / "docs/concepts.md").read_text())
    answer = {"role": "assistant", "content": "A test."}
    chats = [{"messages": [{"role": "user", "content": f"What is {n}?"}, answer]} for n in range(200)]
    Path("chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    Path("held_out.jsonl").write_text("".join(json.dumps({"text": f"This is {n}."}) + "\n" for n in range(20)))
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("one", "two", "three")))
    Path("keys.txt").write_text("sk-somebody\n")
    Path("user.schema.json").write_text(json.dumps({"type": "object", "properties": {"is": {"enum": [1, 2]}}, "required": ["is"]}))
    Path("run.yaml").write_text("extends: configs/quickstart.yaml\n")
    Path("questions.jsonl").write_text(json.dumps({"question": "one and one", "choices": [" two", " three"], "answer": 0}) + "\n")
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(Path("questions.jsonl").resolve())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "question",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}],
    }
    Path("tasks/mine.yaml").write_text(json.dumps(task))
