"""A plugin in a package of its own, installed by pip: listed, described and trained with, fw untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import column, environment

PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "acme-fw-plugins"
version = "2.3"
[project.entry-points."fw.optimizer"]
acme_sgd = "acme_fw:AcmeSGD"
[project.entry-points."fw.schedule"]
acme_steps = "acme_fw:Staircase"
[tool.setuptools]
py-modules = ["acme_fw"]
"""

MODULE = '''
"""Plugins from elsewhere."""
from dataclasses import dataclass

import torch

from fw.kinds.optimizer import OptimizerPlugin, OptimizerSpec
from fw.kinds.schedule import SchedulePlugin
from fw.registry import Conflicts


@dataclass
class AcmeConfig:
    """One knob."""

    lr: float = 0.05
    """Step size."""


class AcmeSGD(OptimizerPlugin):
    """Plain gradient descent from a package of its own."""

    api = 1
    Config = AcmeConfig
    conflicts = (Conflicts("precision", ("bf16_true",), "its small updates would be rounded away"),)

    def spec(self, device):
        return OptimizerSpec(torch.optim.SGD, self.config.lr)


class Staircase(SchedulePlugin):
    """Halves the learning rate every five steps."""

    def factor(self, step, total_steps):
        return 0.5 ** (step // 5)
'''


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed the package, outside this environment so that other tests do not see it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "acme_fw.py").write_text(MODULE)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
        str(source),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    return target


def test_it_is_listed_trained_with_and_refused_where_it_conflicts(workspace, site):
    env = {**environment(), "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}

    def fw(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "fw", *words], capture_output=True, text=True, env=env, timeout=300)

    rows = json.loads(fw("plugins", "list", "optimizer", "--json").stdout)
    row = next(row for row in rows if row["name"] == "acme_sgd")
    assert row == {
        "kind": "optimizer",
        "name": "acme_sgd",
        "distribution": "acme-fw-plugins",
        "version": "2.3",
        "api": 1,
        "available": True,
        "problem": "",
        "advice": "",
        "summary": "Plain gradient descent from a package of its own.",
    }
    assert "Step size." in fw("plugins", "show", "optimizer", "acme_sgd").stdout

    acme = ("optimizer=acme_sgd", "schedule=acme_steps")
    done = fw("train", "tiny.yaml", *acme, "sharding=fsdp", "launch.devices=2", "train.run_dir=acme")
    assert done.returncode == 0, done.stderr
    assert column("acme", "lr")[:11] == [0.05] * 5 + [0.025] * 5 + [0.0125]
    assert json.loads(Path("acme/plugins.json").read_text())["optimizer.acme_sgd"] == "acme-fw-plugins 2.3"
    # The same update rule under its first-party name: the same losses.
    fw("train", "tiny.yaml", "optimizer={name: sgd, lr: 0.05}", "schedule=acme_steps", "train.run_dir=own")
    assert column("acme", "loss") == pytest.approx(column("own", "loss"), rel=1e-5)

    done = fw("train", "tiny.yaml", *acme, "precision=bf16_true")
    assert done.returncode == 2
    expected = "optimizer 'acme_sgd' does not work with precision 'bf16_true', because its small updates would be rounded away"
    assert expected in done.stderr
