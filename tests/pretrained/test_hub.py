"""Models and data of a hub: the hub's own client and `datasets`, over HTTP, of a server on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tokens
from conftest import column, environment, fw, summary
from hub import Hub, hub_at
from models.architectures import VOCABULARY, save

RECORDS = [{"prompt": f"what is {n}", "completion": f"it is {n * n}"} for n in range(60)]


@pytest.fixture
def hub(workspace: Path) -> Iterator[Hub]:
    """A model, with a pickle beside its weights, and a dataset of two splits."""
    model = workspace / "hub/models/acme/tiny"
    save("llama", model)
    tokens.save(model, VOCABULARY)
    (model / "pytorch_model.bin").write_bytes(b"a pickle, which nobody is to open")
    data = workspace / "hub/datasets/acme/sums"
    data.mkdir(parents=True)
    for split, records in (("train", RECORDS[:50]), ("test", RECORDS[50:])):
        (data / f"{split}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with hub_at(workspace / "hub") as found:
        yield found


def run(hub: Hub, *words: str, **more: str) -> Any:
    return fw(*words, env={**environment(), **hub.environment(Path("home")), **more})


TUNING = """
model: {name: auto, path: acme/tiny}
peft: {name: lora, rank: 4, targets: [all-linear]}
data: {name: jsonl, dataset: acme/sums, val_split: test, streaming: STREAMING, tokenizer: acme/tiny}
train: {max_steps: 4, global_batch_size: 4, sequence_length: 64, val_every: 4, save_every: 2, sample_tokens: 0, run_dir: run}
launch: {accelerator: cpu}
"""


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_a_model_of_the_hub_learns_from_data_of_the_hub_and_goes_on(hub: Hub, streaming: str) -> None:
    Path("tuning.yaml").write_text(TUNING.replace("STREAMING", streaming))
    run(hub, "train", "tuning.yaml", "train.max_steps=2").ok()
    assert any("model.safetensors" in asked for asked in hub.asked) and not any(".bin" in asked for asked in hub.asked)
    files = [asked for asked in hub.asked if asked.startswith("GET /datasets/acme/sums/resolve/")]
    assert files and all(hub.commit("datasets", "acme/sums") in asked for asked in files), files  # what was pushed meanwhile is not read
    del hub.asked[:]
    done = run(hub, "train", "tuning.yaml", "resume=auto").ok()
    assert "step 4/4" in done.err and summary("run")["steps"] == 4
    assert not [asked for asked in hub.asked if "GET" in asked and "resolve" in asked], "what is there was fetched again"
    here = {"model.path": "hub/models/acme/tiny", "data.dataset": "hub/datasets/acme/sums", "data.tokenizer": "hub/models/acme/tiny"}
    Path("hub/models/acme/tiny/pytorch_model.bin").unlink()
    run(hub, "train", "tuning.yaml", *(f"{key}={value}" for key, value in here.items()), "train.run_dir=here").ok()
    assert column("run", "loss") == column("here", "loss")


def test_what_was_pushed_since_is_another_dataset(hub: Hub) -> None:
    Path("tuning.yaml").write_text(TUNING.replace("STREAMING", "false"))
    before = hub.commit("datasets", "acme/sums")
    run(hub, "train", "tuning.yaml", "train.max_steps=2").ok()
    file = Path("hub/datasets/acme/sums/train.jsonl")
    file.write_text(file.read_text().replace("it is", "that is"))
    refused = run(hub, "train", "tuning.yaml", "resume=auto")
    assert refused.code == 2 and "data" in refused.err, refused.err
    offline = run(hub, "train", "tuning.yaml", "resume=auto", f"data.revision={before}", HF_HUB_OFFLINE="1")
    newest = hub.commit("datasets", "acme/sums")
    assert offline.code == 2 and f"data.revision: of acme/sums the newest in the cache is {newest}" in offline.err, offline.err
    file.write_text(file.read_text().replace("that is", "it is"))
    assert "step 4/4" in run(hub, "train", "tuning.yaml", "resume=auto").ok().err


def test_without_a_network_the_cache_is_what_there_is(hub: Hub) -> None:
    asked = ("generate", "acme/tiny", "what is 7", "--max-tokens", "4", "--temperature", "0")
    online = run(hub, *asked).ok()
    del hub.asked[:]
    assert run(hub, *asked, HF_HUB_OFFLINE="1").ok().out == online.out and not hub.asked


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["model.path=acme/nothing"], "acme/nothing: no such directory, and the hub gives none (RepositoryNotFoundError"),
        (["model.path=acme/tiny@v9"], "acme/tiny@v9: no such directory, and the hub gives none (RevisionNotFoundError"),
        (["data.dataset=acme/nothing"], "data.dataset: acme/nothing is neither a directory nor a dataset of the hub"),
        (["data.revision=v9"], "data.revision: acme/sums has no 'v9' on the hub"),
        (["data.split=nonsense"], 'data.dataset: acme/sums cannot be opened: Unknown split "nonsense"'),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_a_hub_has_not_is_said_in_a_sentence(hub: Hub, words: list[str], sentence: str) -> None:
    Path("tuning.yaml").write_text(TUNING.replace("STREAMING", "false"))
    refused = run(hub, "train", "tuning.yaml", *words)
    assert refused.code == 2 and sentence in refused.err and len(refused.err.strip().splitlines()) == 1, refused.err
    assert not Path("run").exists()


def test_the_client_of_the_hub_reads_all_that_is_there(hub: Hub) -> None:
    """The server stands for the hub, for its own client."""
    program = "import sys, huggingface_hub as hub; print(sorted(hub.HfApi().list_repo_files('acme/sums', repo_type='dataset')))"
    env = {**environment(), **hub.environment(Path("home"))}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert told.stdout == f"{['test.jsonl', 'train.jsonl']}\n", told.stderr
