"""Where metrics go: what each of them has in the end is what the run did, and one that fails stops nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from conftest import column, environment, fw

WORDS = ["train.max_steps=3", "train.sample_tokens=4", "memory.measure_step=2"]
FAILING = """
from pathlib import Path

from fw.api import LoggerPlugin, register


@register("failing")
class Failing(LoggerPlugin):
    api = 1

    def build(self, run_dir, run_name, start_step):
        from pytorch_lightning.loggers import Logger

        where = Path("where").read_text()
        if where == "build":
            raise RuntimeError("no such server")

        class Inner(Logger):
            name = version = "failing"

            def log_metrics(self, metrics, step=None):
                if where == "log_metrics":
                    raise RuntimeError("no such server")
                Path("logged").touch()

            def log_hyperparams(self, params, *args, **kwargs):
                if where == "log_hyperparams":
                    raise RuntimeError("no such server")

            def finalize(self, status):
                if where == "finalize":
                    raise RuntimeError("no such server")

        return Inner()

    def text(self, logger, name, text, step):
        if Path("where").read_text() == "text":
            raise RuntimeError("no such server")
"""


@pytest.mark.parametrize("where", ["build", "log_metrics", "log_hyperparams", "text", "finalize"])
def test_one_that_fails_stops_nothing(workspace: Path, where: str) -> None:
    Path("failing.py").write_text(FAILING)
    Path("where").write_text(where)
    done = fw("train", "tiny.yaml", *WORDS, "plugins=[failing.py]", "logger=[failing, csv]").ok()
    assert done.err.count("warning: logger 'failing' failed") == 1 and "no such server" in done.err
    beside = where in ("text", "log_hyperparams")
    assert ("logs metrics without its config" in done.err) == beside and Path("logged").exists() == (beside or where == "finalize")
    assert len(column("run", "loss")) == 3


def test_tensorboard_has_scalars_texts_and_memory(workspace: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fw("train", "tiny.yaml", *WORDS, "logger=[csv, tensorboard]").ok()
    found = EventAccumulator("run/tensorboard").Reload()
    assert [event.value for event in found.Scalars("loss")] == pytest.approx(column("run", "loss"), rel=1e-6)
    assert "memory" in found.Tags()["images"]
    texts = {name: found.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in found.Tags()["tensors"]}
    said = yaml.safe_load(texts["config/text_summary"])
    assert said["train"]["max_steps"] == 3 and said["optimizer"]["name"] == "adamw"
    assert "▸" in texts["sample/text_summary"]


def test_wandb_offline(workspace: Path) -> None:
    pytest.importorskip("wandb")
    fw("train", "tiny.yaml", *WORDS, "logger=[csv, {name: wandb, offline: true}]", env={**environment(), "WANDB_SILENT": "true"}).ok()
    (kept,) = Path("run/wandb").glob("offline-run-*/run-*.wandb")
    assert kept.stat().st_size > 1000 and list(Path("run/wandb").glob("offline-run-*/files/media/images/memory*.png"))


def test_mlflow_in_a_local_store(workspace: Path) -> None:
    pytest.importorskip("mlflow")
    fw("train", "tiny.yaml", *WORDS, "logger=[csv, mlflow]").ok()
    with closing(sqlite3.connect("run/mlflow.db")) as store:
        values = [value for (value,) in store.execute("select value from metrics where key = 'loss' order by step")]
        options = dict(store.execute("select key, value from params"))
        (status,) = next(store.execute("select status from runs"))
    assert values == pytest.approx(column("run", "loss"), rel=1e-6)
    assert options["optimizer.name"] == "adamw" and options["train.max_steps"] == "3" and status == "FINISHED"
    assert {"config.txt", "sample.txt", "memory.png"} <= {path.name for path in Path("run/mlflow").rglob("*")}
