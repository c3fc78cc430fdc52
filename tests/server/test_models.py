"""What can be served: runs by their config, models of an architecture that transformers alone knows, and what is said of the rest."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

import fw as package
from conftest import fw
from fw.cli import main
from serving import Server, serving

ASKED = {"prompt": "the model reads", "max_tokens": 8, "temperature": 0}


def test_a_training_run_by_its_config(workspace):
    """Which may be extended by what is said of its server."""
    fw("train", "tiny.yaml", "train.max_steps=2", "train.save_every=2").ok()
    Path("serve.yaml").write_text("extends: tiny.yaml\nserve: {name: ours, max_n: 2}\ninference: {dtype: fp32, max_sequences: 3}\n")
    (right,) = package.LLM("run", dtype="fp32").generate("the model reads", max_tokens=8, temperature=0)
    for file, name, most, sequences in (("tiny.yaml", "run", 16, 64), ("serve.yaml", "ours", 2, 3)):
        with serving(file, "inference.dtype=fp32") as server, server.client() as http:
            assert [each["id"] for each in http.get("/v1/models").json()["data"]] == [name]
            assert http.post("/v1/completions", json=ASKED).json()["choices"][0]["text"] == right.text
            assert http.post("/v1/completions", json={**ASKED, "n": most + 1}).status_code == 400
            assert server.stats()["max_sequences"] == sequences


def test_an_architecture_that_no_plugin_reads(directory, tmp_path):
    """Is told by the engine, and so by the server, whose address is there before."""
    shutil.copytree(directory, tmp_path / "model")
    config = tmp_path / "model/config.json"
    config.write_text(config.read_text().replace('"llama"', '"gpt_neox"'))
    server = Server(tmp_path / "model", ready=False)
    assert server.ended() == 2
    assert "config.json: no model plugin reads model_type 'gpt_neox' (there are: " in server.errors[-1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere"),
        (["tiny.yaml"], "tiny.yaml: its run directory run is not there; train first (fw train tiny.yaml), or give a model directory"),
        (["serve.yaml"], "serve.yaml: no model; add 'serve: {model: DIR}'"),
        (["both.yaml", "serve.prot=1"], "unknown key 'prot' in 'serve'; did you mean 'port'?"),
        (["both.yaml", "train.max_steps=1"], "train"),
        (["both.yaml", "serve.drain=-1"], "serve.drain: -1"),
        (["both.yaml", "serve.max_body=1"], "serve.max_body: 1 holds no request"),
        (["both.yaml", "--adapter", "poems"], "serve.adapters: poems: give NAME=DIR"),
        (["both.yaml", "--host", "0.0.0.0"], "serve.host: 0.0.0.0 can be reached by others, and there are no API keys"),
        (["both.yaml", "--api-keys", "nokeys"], "serve.api_keys: nokeys cannot be read"),
        (["both.yaml", "--adapters-dir", "none"], "serve.adapters_dir: there is no directory none; make it"),
        (["both.yaml", "--host", "203.0.113.1", "--insecure"], "cannot listen at 203.0.113.1:8000"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_said_in_a_sentence(workspace, capfd, monkeypatch, words, message):
    monkeypatch.delenv("FW_API_KEYS", raising=False)
    Path("serve.yaml").write_text("inference: {dtype: fp32}\n")
    Path("both.yaml").write_text("serve: {model: nowhere}\n")
    before = set(os.listdir())
    handlers = logging.getLogger().handlers[:]
    assert main(["serve", *words]) == 2
    assert logging.getLogger().handlers == handlers  # what is said later does not go to a log that may be closed
    said = capfd.readouterr().err.strip().splitlines()[-1]
    assert message in said
    assert set(os.listdir()) == before
