"""What tests share: a small corpus, a small config, and running `fw` as a user does."""

from __future__ import annotations

import csv
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import share
import warm_python
from fw.caches import cache_dir

REPOSITORY = Path(__file__).parent.parent
_KERNELS = cache_dir() / "kernels"


def _hands_out(config: pytest.Config) -> bool:
    """Whether this process runs no test itself: pytest-xdist's first."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if not _hands_out(config):
        warm_python.install()


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share.divide(items, whole_files=not any("::" in word for word in config.args))


TINY: dict[str, Any] = {
    "model": {
        "name": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    },
    "data": {"name": "text", "files": ["corpus.txt"], "tokenizer": "byte"},
    "optimizer": {"name": "adamw", "lr": 1e-3},
    "schedule": {"name": "cosine", "warmup_steps": 4, "total_steps": 40},
    "train": {
        "max_steps": 20,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "sequence_length": 64,
        "val_every": 0,
        "save_every": 0,
        "sample_tokens": 0,
        "run_dir": "run",
    },
    "launch": {"accelerator": "cpu"},
    "logger": ["csv"],
}


def corpus_text(paragraphs: int = 400) -> str:
    """English-like text, the same everywhere."""
    import random

    words = [
        "the",
        "a",
        "model",
        "reads",
        "text",
        "learns",
        "to",
        "predict",
        "what",
        "comes",
        "next",
        "and",
        "memory",
        "is",
        "never",
        "enough",
        "for",
        "all",
        "of",
        "it",
    ]
    chance = random.Random(0)
    return "\n\n".join(" ".join(chance.choices(words, k=chance.randint(8, 30))).capitalize() + "." for _ in range(paragraphs))


@pytest.fixture(autouse=True)
def loading_environment() -> Iterator[None]:
    with warm_python.loading_environment():
        yield


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(own_cache(tmp_path_factory.mktemp("cache")))


def own_cache(directory: Path) -> str:
    """For ``FW_CACHE``: empty but for compiled kernels, which are the user's own, for compiling takes longer than most tests."""
    _KERNELS.mkdir(parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "kernels").exists():
        (directory / "kernels").symlink_to(_KERNELS)
    return str(directory)


@pytest.fixture
def workspace(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own as current directory, with a corpus and `tiny.yaml` in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FW_CACHE", str(cache))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(corpus_text())
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY, sort_keys=False))
    return tmp_path


class Finished:
    """A finished `fw`: exit code and what it printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def ok(self) -> Finished:
        assert self.code == 0, f"exit code {self.code}\n{self.out}\n{self.err}"
        return self


def environment() -> dict[str, str]:
    """As a shell would have it: nothing of a launcher, no colours."""
    kept = {k: v for k, v in os.environ.items() if k not in ("FW_DEBUG", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    return {**kept, "PYTHONUNBUFFERED": "1"}


def start(*words: str, **more: Any) -> subprocess.Popen[str]:
    """Start `fw` in a process of its own; ``more`` goes to :class:`subprocess.Popen`."""
    return subprocess.Popen([sys.executable, "-m", "fw", *words], text=True, **{"env": environment(), **more})


def fw(*words: str, timeout: float = 300, **more: Any) -> Finished:
    """Run `fw` to its end."""
    process = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Finished(process.returncode, out, err)


@pytest.fixture(name="fw")
def run_fw() -> Callable[..., Finished]:
    return fw


def metrics(run_dir: str | Path) -> list[dict[str, float | None]]:
    """`metrics.csv` as numbers; None where a column is empty."""
    with (Path(run_dir) / "metrics.csv").open(newline="") as file:
        return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]


def summary(run_dir: str | Path) -> dict[str, Any]:
    return json.loads((Path(run_dir) / "summary.json").read_text())


def column(run_dir: str | Path, name: str) -> list[float]:
    return [row[name] for row in metrics(run_dir)]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the directory of a model that has learnt nothing, by its case of ``models.architectures``, with a tokenizer."""
    import tokens
    from models.architectures import VOCABULARY, save

    found: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in found:
            found[case] = tmp_path_factory.mktemp(case)
            save(case, found[case])
            tokens.save(found[case], VOCABULARY)
        return found[case]

    return make


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """``s3://…`` on a server of this machine; the environment tells clients, also in other processes, where it is."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    import s3fs

    s3fs.S3FileSystem().mkdir("fw-tests")
    yield "s3://fw-tests"
    for name, value in before.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value
    server.stop()
