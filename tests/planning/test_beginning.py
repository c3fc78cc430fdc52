"""`fw init`: what it writes resolves, fits by `fw plan`, and says what its options do."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from conftest import environment, fw
from fw.errors import UserError
from fw.planning.ask import plan
from fw.planning.beginning import Wanted, _has_bf16, begin

CHATS = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(40)]
PAIRS = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(40)]
SMALL = ["train.max_steps=2", "train.val_every=0", "train.save_every=2", "train.sample_tokens=0", "train.run_dir=other"]


@pytest.fixture
def base(workspace: Path) -> Path:
    """A run whose model can be gone on from; conversations and pairs beside it."""
    fw("train", "tiny.yaml", "train.max_steps=2", "train.save_every=2", "train.sequence_length=128").ok()
    step = Path("run/checkpoints/latest").resolve()
    settings = json.loads((step / "tokenizer_config.json").read_text()) if (step / "tokenizer_config.json").exists() else {}
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (step / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    Path("chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in CHATS))
    Path("pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in PAIRS))
    return workspace


@pytest.mark.parametrize("task", ["sft", "lora", "qlora", "dpo"])
def test_what_is_written_trains(base: Path, task: str) -> None:
    done = fw("init", "--task", task, "--model", "run", "--device", "cpu", "--length", "64").ok()
    assert done.out == f"{task}.yaml\n" and "allocated" in done.err and f"fw train {task}.yaml" in done.err
    text = Path(f"{task}.yaml").read_text()
    for section, options in yaml.safe_load(text).items():
        for key in options:
            assert re.search(rf"^  # .+\n  {key}:", text, re.MULTILINE), f"{section}.{key} is not explained"
    more = ["optimizer.name=adamw_8bit"] if task == "qlora" else []
    fw("train", f"{task}.yaml", *SMALL, *more).ok()


def test_pretraining_a_preset_on_a_gpu_that_is_not_here(workspace: Path) -> None:
    where = ["--device", "rtx4090", "--data", "corpus.txt", "--to", "mine.yaml", "--length", "256"]
    fw("init", "--task", "pretrain", "--model", "gpt2", *where, timeout=900).ok()  # some forty plans
    config = yaml.safe_load(Path("mine.yaml").read_text())
    assert config["data"]["files"] == ["corpus.txt"] and config["launch"]["accelerator"] == "cuda"
    stand_in = "data={name: synthetic, vocab_size: 32000}"
    planned = json.loads(fw("plan", "mine.yaml", stand_in, "--device", "rtx4090", "--json", "--strict").ok().out)
    assert planned["fits"] and planned["budget_bytes"] > 20e9


@pytest.mark.parametrize("task", ["lora", "pretrain"])
def test_several_ranks(base: Path, task: str) -> None:
    """Which divide the model somehow, as the file says."""
    data = ["--data", "corpus.txt"] if task == "pretrain" else []
    fw("init", "--task", task, "--model", "run", "--device", "cpu", "--ranks", "2", "--length", "32", "--budget", "1GiB", *data).ok()
    config = yaml.safe_load(Path(f"{task}.yaml").read_text())
    assert config["launch"]["devices"] == 2 and config["sharding"] and config["train"]["global_batch_size"] % 16 == 0
    fw("train", f"{task}.yaml", *SMALL).ok()


def test_what_is_chosen_has_sections_of_its_own(base: Path) -> None:
    """Offload, which has one plugin only and no name, where a GPU is too small."""
    fw("init", "--task", "sft", "--model", "run", "--device", "rtx4090", "--length", "64", "--budget", "560MiB").ok()
    text = Path("sft.yaml").read_text()
    assert "device" not in yaml.safe_load(text)["train"] and "memory:" in text


def test_a_budget_changes_what_is_chosen(base: Path) -> None:
    """And stands in the file, where nothing is chosen a second time."""
    words = ("init", "--task", "sft", "--model", "run", "--device", "cpu", "--length", "128")
    fw(*words, "--to", "free.yaml").ok()
    fw(*words, "--budget", "10MiB", "--to", "bound.yaml").ok()
    free, bound = (yaml.safe_load(Path(name).read_text()) for name in ("free.yaml", "bound.yaml"))
    assert bound["memory"] == {"budget": "10MiB", "techniques": []} and "memory" not in free
    assert {key: bound[key] for key in bound if key != "memory"} != free
    planned = json.loads(fw("plan", "bound.yaml", "data={name: synthetic, vocab_size: 257, min_length: 64}", "--json").ok().out)
    assert planned["fits"] and planned["budget_bytes"] == 10 << 20
    failed = fw(*words, "--budget", "1MiB", "--to", "none.yaml")
    assert failed.code == 2 and "nothing fits 1 MiB" in failed.err and not Path("none.yaml").exists()


def test_a_server(base: Path) -> None:
    done = fw("init", "--task", "serve", "--model", "run", "--device", "cpu", "--budget", "64MiB").ok()
    assert done.out == "serve.yaml\n" and "fw serve serve.yaml" in done.err
    config = yaml.safe_load(Path("serve.yaml").read_text())
    assert config["serve"]["model"] == "run" and config["inference"]["budget"] == "64MiB" and config["inference"]["device"] == "cpu"
    words = ("init", "--task", "serve", "--model", "run", "--device", "cpu")
    fw(*words, "--ranks", "2", "--length", "32", "--to", "two.yaml").ok()
    inference = yaml.safe_load(Path("two.yaml").read_text())["inference"]
    assert inference["tensor"] == 2 and inference["max_context"] == 32
    failed = fw(*words, "--data", "chats.jsonl", "--to", "no.yaml")
    assert failed.code == 2 and "--data: who serves learns from nothing; leave it out" in failed.err
    failed = fw("init", "--task", "serve", "--model", "run", "--device", "cpu", "--budget", "1MiB", "--to", "no.yaml")
    assert failed.code == 2 and "nothing fits 1 MiB" in failed.err


def test_an_older_gpu_here_computes_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _has_bf16(Wanted("llama", "pretrain")) and not _has_bf16(Wanted("llama", "pretrain", "v100-32gb"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((7, 5), (8, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert _has_bf16(Wanted("llama", "pretrain")) == (capability == (8, 0)) and _has_bf16(Wanted("llama", "pretrain", "cpu"))


@pytest.mark.slow
def test_a_server_on_a_gpu(tmp_path: Path) -> None:
    """In 16 bits that the device has, and in fewer where a budget wants it; never as a CPU keeps weights."""
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps({**config, **shape, "tie_word_embeddings": False}))
    whole = plan(tmp_path, "inference.dtype=bf16", device="h100-80gb").largest
    least = whole.taken - whole.at_peak["kv"] - (20 << 20)
    for device, budget, wanted in (
        ("h100-80gb", "", {"dtype": "bf16"}),
        ("v100-32gb", "", {"dtype": "fp16"}),
        ("h100-80gb", f"{least}B", {"dtype": "bf16", "budget": f"{least}B"}),
    ):
        begun = begin(Wanted(str(tmp_path), "serve", device, budget))
        found = yaml.safe_load(begun.text)
        assert found["inference"] == {"device": "cuda", **wanted} and device in begun.told
        assert found.get("quantization") == ({"name": "w8a16", "group_size": -1} if budget else None)
    with pytest.raises(UserError, match=r"nothing fits 300 MiB \(weights as they are: .*weights in 8 bits: .*weights in 4 bits: "):
        begin(Wanted(str(tmp_path), "serve", "rtx4090", "300MiB"))


def test_what_is_left_out_is_asked_at_a_terminal(base: Path) -> None:
    first, second = pty.openpty()
    words = [sys.executable, "-m", "fw", "init", "--length", "64"]
    process = subprocess.Popen(words, stdin=second, stderr=second, stdout=subprocess.PIPE, text=True, env=environment())
    os.close(second)
    os.write(first, b"lora\nrun\ncpu\n\nchats.jsonl\n")
    said = b""
    try:
        while select.select([first], [], [], 120)[0] and (chunk := os.read(first, 4096)):
            said += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        process.kill() if process.poll() is None and b"next:" not in said else None
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert out == "lora.yaml\n" and all(
        word in said for word in (b"task (", b"model (", b"device (", b"memory of a rank", b"files to learn")
    )
    assert yaml.safe_load(Path("lora.yaml").read_text())["data"]["files"] == ["chats.jsonl"]


def test_what_is_wrong_is_said(base: Path) -> None:
    def refused(*words: str) -> str:
        found = fw("init", *words, stdin=subprocess.DEVNULL)
        assert found.code == 2 and len(found.err.strip().splitlines()) == 1, found.err
        return found.err

    assert "--task is missing, and there is no terminal" in refused()
    assert "--model is missing" in refused("--task", "lora")
    assert "there is no 'lorra'; did you mean 'lora'?" in refused("--task", "lorra", "--model", "run")
    assert "none of fw's models; did you mean 'llama3.1-8b'?" in refused("--task", "pretrain", "--model", "llama31-8b")
    assert "has initial values only" in refused("--task", "lora", "--model", "llama3.1-8b")
    assert "--ranks: 0 is too small" in refused("--task", "lora", "--model", "run", "--ranks", "0")
    assert "nodevice" in refused("--task", "lora", "--model", "run", "--device", "nodevice")
    assert "--to: tiny.yaml exists already" in refused("--task", "lora", "--model", "run", "--to", "tiny.yaml")
