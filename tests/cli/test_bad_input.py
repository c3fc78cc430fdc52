"""Bad input: one sentence on stderr, exit code 2, nothing touched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from conftest import fw
from fw.cli import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["train", "tiny.yaml", "train.max_stps=3"], "unknown key 'max_stps' in 'train'; did you mean 'max_steps'?"),
        (
            ["train", "tiny.yaml", "optimizer=adam"],
            "unknown optimizer 'adam'; did you mean 'adamw'? (there are: adafactor, adamw, ",
        ),
        (["train", "tiny.yaml", "train.seed=x"], "override train.seed=x: train.seed: 'x' is not of type int"),
        (["train", "tiny.yaml", "data.files=nowhere.txt"], "data.files: 'nowhere.txt' matches no file"),
        (["train", "tiny.yaml", "train.global_batch_size=7"], "the nearest that are: 6 and 8"),
        (["train", "tiny.yaml", "resume=nowhere"], "override resume=nowhere: nowhere is no checkpoint"),
        (
            ["train", "tiny.yaml", "launch.devices=2"],
            "sharding 'single' runs on one rank, not 2; choose sharding=ddp or sharding=fsdp",
        ),
        (["train", "tiny.yaml", "model.vocab_size=100"], "model.vocab_size 100 is smaller than the tokenizer's 257"),
        (["train", "tiny.yaml", "train.sequence_length=1000000"], "fill no sequence of 1000000"),
        (["train"], "the following arguments are required: config"),
        (["trian"], "invalid choice: 'trian'"),
        (["plugins", "show", "optimizer", "adamx"], "unknown optimizer 'adamx'"),
    ],
)
def test_is_one_sentence_and_exit_code_2(workspace, capsys, words, message):
    before = set(Path().iterdir())
    assert main(words) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("fw: data:")]
    assert len(lines) == 1 and lines[0].startswith("fw: error: ") and message in lines[0], captured.err
    assert not captured.out and set(Path().iterdir()) == before


def test_two_ranks_say_it_once(workspace):
    done = fw("train", "tiny.yaml", "sharding=ddp", "launch.devices=2", "train.run_dir=corpus.txt/run")
    assert done.code == 2 and done.err.count("corpus.txt/run cannot be used") == 1
    done = fw("train", "tiny.yaml", "sharding=ddp", "launch.devices=2", "resume=nowhere")
    assert done.code == 2 and done.err.count("nowhere is no checkpoint") == 1


def test_an_unexpected_failure_names_itself_and_debug_shows_where(workspace, monkeypatch, capsys):
    from fw_plugins.optimizer.adamw import AdamW

    def broken(self, device):
        raise KeyError("gremlin")

    monkeypatch.setattr(AdamW, "spec", broken)
    monkeypatch.delenv("FW_DEBUG", raising=False)
    assert main(["train", "tiny.yaml"]) == 1
    assert "fw: error: KeyError: 'gremlin' (unexpected; --debug shows the traceback)" in capsys.readouterr().err
    assert main(["--debug", "train", "tiny.yaml"]) == 1
    assert "in broken" in capsys.readouterr().err
    os.environ.pop("FW_DEBUG")  # set by main; monkeypatch would bring it back


def test_config_prints_what_it_resolves_to(workspace, capsys):
    assert main(["config", "tiny.yaml", "train.seed=3", "--origin"]) == 0
    out = capsys.readouterr().out
    assert "train.seed: 3" in out and "# override train.seed=3" in out and "# default" in out and "# tiny.yaml:2" in out
    assert main(["config", "tiny.yaml", "--origin", "train.seed=4"]) == 0
    assert "train.seed: 4" in capsys.readouterr().out
    assert main(["config", "tiny.yaml", "--orgin", "train.seed=4"]) == 2
    assert "unrecognized arguments: --orgin" in capsys.readouterr().err
    assert main(["config", "tiny.yaml", "train.seed=${train.max_steps}"]) == 0
    assert "seed: 20" in capsys.readouterr().out
    assert main(["config", "tiny.yaml", "train.seed=${train.max_steps}", "--unresolved"]) == 0
    assert "seed: ${train.max_steps}" in capsys.readouterr().out
    adapters = "peft={name: lora, ranks: {'layers.0.self_attn.q_proj': 4}}"  # a key with dots is one
    assert main(["config", "tiny.yaml", adapters, "--origin"]) == 0
    assert "peft.ranks.layers.0.self_attn.q_proj: 4" in capsys.readouterr().out
    assert main(["config", "tiny.yaml", adapters, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peft.ranks.layers.0.self_attn.q_proj"]["value"] == 4
