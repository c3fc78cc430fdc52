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
