"""Plugins in packages of somebody else's, in an environment of their own: pip installs them, and fw is as it was."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import serving
from conftest import column, environment

HERE = Path(__file__).parent
PACKAGES = ("adabelief", "gpt_neox", "half_cache")
OWN = [
    "model={name: gpt_neox, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 48}",
    "optimizer={name: adabelief, lr: 0.003}",
    "data={name: text, files: [corpus.txt], tokenizer: byte}",
]


class Environment:
    """One of Python's, which sees what this one has, and packages of its own besides."""

    def __init__(self, place: Path) -> None:
        venv.create(place, symlinks=True)
        self.python = place / "bin" / "python"
        (own,) = place.glob("lib/python*/site-packages")
        # Of the parent's, with what it has installed in place (fw itself).
        (own / "parent.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()))

    def install(self, *directories: Path) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q", "--no-deps", "--no-build-isolation"]
        done = subprocess.run([*command, *map(str, directories)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def run(self, *words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(HERE.parent / "testing"), str(HERE.parent)])
        env = {**environment(), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.run([str(self.python), *words], cwd=cwd, capture_output=True, text=True, env=env, timeout=1500, check=False)

    def fw(self, *words: str) -> str:
        done = self.run("-m", "fw", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def refusal(self, *words: str) -> str:
        done = self.run("-m", "fw", *words)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
        return done.stderr


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies, since building leaves files beside them."""
    place = tmp_path_factory.mktemp("sources")
    for package in PACKAGES:
        shutil.copytree(HERE / package, place / package)
    return place


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Environment:
    made = Environment(tmp_path_factory.mktemp("environment"))
    made.install(*(sources / package for package in PACKAGES))
    return made


def test_they_are_there_and_only_there(packages: Environment) -> None:
    found = {(row["kind"], row["name"]): row for row in json.loads(packages.fw("plugins", "list", "--json"))}
    for kind, name, distribution in (
        ("optimizer", "adabelief", "fw-adabelief"),
        ("model", "gpt_neox", "fw-gpt-neox"),
        ("kv_cache", "half", "fw-half-cache"),
    ):
        row = found[kind, name]
        assert (row["distribution"], row["version"], row["available"]) == (distribution, "0.3.1", True)
    assert "Decay of the squared distance" in packages.fw("plugins", "show", "optimizer", "adabelief")
    here = subprocess.run([sys.executable, "-m", "fw", "plugins", "list"], capture_output=True, text=True, check=True)
    assert "adabelief" not in here.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_they_pass_what_every_plugin_of_their_kind_must(packages: Environment, sources: Path, package: str) -> None:
    assert len((sources / package / f"test_fw_{package}.py").read_text().splitlines()) <= 10
    words = ("-m", "pytest", "-q", "-p", "warm", "-p", "no:cacheprovider", "--import-mode=importlib", f"test_fw_{package}.py")
    done = packages.run(*words, cwd=sources / package)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def test_the_optimizer_is_the_papers(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its algorithm 2, in fp64 and by numpy."""
    monkeypatch.syspath_prepend(str(sources / "adabelief"))
    import fw_adabelief

    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64))
    optimizer = fw_adabelief.Update([weight], lr=0.02, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1)
    expected = weight.detach().numpy().copy()
    mean, belief = np.zeros_like(expected), np.zeros_like(expected)
    for step in range(1, 6):
        weight.grad = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        optimizer.step()
        g = weight.grad.numpy()
        mean = 0.8 * mean + 0.2 * g
        belief = 0.95 * belief + 0.05 * (g - mean) ** 2 + 1e-8
        expected = expected * (1 - 0.02 * 0.1)
        expected = expected - 0.02 * (mean / (1 - 0.8**step)) / (np.sqrt(belief / (1 - 0.95**step)) + 1e-8)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-12)


def test_planned_trained_saved_resumed_and_served(workspace: Path, packages: Environment) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    planned = json.loads(packages.fw("plan", "tiny.yaml", *OWN, "--json"))["per_rank"][0]
    parts = planned["components_max"]
    assert 0 <= parts["optimizer_bytes"] - 2 * parts["parameters_bytes"] < 1024, "two moments, and a count of steps each"
    packages.fw("train", "tiny.yaml", *OWN, "train.max_steps=6", "train.run_dir=whole", "memory.measure_step=2")
    measured = json.loads(Path("whole/memory.json").read_text())["per_rank"][0]
    assert measured["allocated_peak_bytes"] == pytest.approx(planned["allocated_peak_bytes"], rel=0.02)
    own = json.loads(Path("whole/plugins.json").read_text())
    assert own["optimizer.adabelief"] == "fw-adabelief 0.3.1" and own["model.gpt_neox"] == "fw-gpt-neox 0.3.1"

    half = ("train.save_every=3", "train.run_dir=halves")
    done = packages.run("-m", "fw", "train", "tiny.yaml", *OWN, "train.max_steps=3", *half, "sharding=fsdp", "launch.devices=2")
    assert done.returncode == 0, done.stdout + done.stderr
    warned = [line for line in done.stderr.splitlines() if "is not known to have been tested with" in line]
    assert sorted(line.partition("warning: ")[2] for line in warned) == [
        "model 'gpt_neox' of fw-gpt-neox is not known to have been tested with sharding 'fsdp'",
        "optimizer 'adabelief' of fw-adabelief is not known to have been tested with sharding 'fsdp'",
    ]
    packages.fw("train", "tiny.yaml", *OWN, "train.max_steps=6", *half, "resume=auto")
    assert column("halves", "loss") == pytest.approx(column("whole", "loss"), rel=1e-4)

    model = Path("halves/checkpoints/latest").resolve()
    tokenizer, theirs = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = tokenizer("the model reads", return_tensors="pt").input_ids
    expected = tokenizer.decode(theirs.generate(prompt, max_new_tokens=8, do_sample=False, min_new_tokens=8)[0, prompt.shape[1] :])
    words = ("the model reads", "--max-tokens", "8", "--temperature", "0")
    assert packages.fw("generate", str(model), *words, "kv_cache=half").strip() == expected.strip()

    with serving.serving(str(model), "kv_cache=half", "serve.name=it", python=packages.python) as server, server.openai() as client:
        found = client.completions.create(model="it", prompt="the model reads", max_tokens=8, temperature=0)
    assert found.choices[0].text == expected


TROUBLES = {
    "broken": ("optimizer", "broken", "import nothing_that_there_is\n"),
    "twin": ("optimizer", "adabelief", "from fw_adabelief import AdaBelief as Plugin\n"),
    "newer": (
        "schedule",
        "newer",
        "from fw.api import SchedulePlugin\nclass Plugin(SchedulePlugin):\n    '''Of tomorrow.'''\n    api = 99\n",
    ),
    "slow": (
        "schedule",
        "slow",
        "import pathlib\n"
        "from fw.api import SchedulePlugin\n"
        "(pathlib.Path(__file__).parent / 'slow.imported').touch()  # what takes a minute stands here\n"
        "class Plugin(SchedulePlugin):\n    '''One that takes long to import.'''\n    api = 1\n"
        "    def factor(self, step, total_steps):\n        return 1.0\n",
    ),
}


def test_what_gives_trouble_is_said_and_harms_nobody_else(workspace: Path, tmp_path_factory: pytest.TempPathFactory, sources: Path) -> None:
    place = tmp_path_factory.mktemp("troubles")
    for name, (kind, entry, module) in TROUBLES.items():
        (place / name).mkdir()
        project = f'[project]\nname = "fw-{name}"\nversion = "1.0"\n[project.entry-points."fw.{kind}"]\n{entry} = "trouble_{name}:Plugin"\n'
        (place / name / "pyproject.toml").write_text(f'{project}[tool.setuptools]\npy-modules = ["trouble_{name}"]\n')
        (place / name / f"trouble_{name}.py").write_text(module)
    own = Environment(tmp_path_factory.mktemp("environment"))
    own.install(sources / "adabelief", *(place / name for name in TROUBLES))
    (imported,) = own.python.parent.parent.glob("lib/python*/site-packages")
    imported /= "slow.imported"

    listed = {(row["name"], row["distribution"]): row for row in json.loads(own.fw("plugins", "list", "--json"))}
    assert not imported.exists(), "a list imports nothing"
    assert "nothing_that_there_is" in listed["broken", "fw-broken"]["problem"]
    assert "99" in listed["newer", "fw-newer"]["problem"]
    assert listed["slow", "fw-slow"]["available"]
    assert {"fw-adabelief", "fw-twin"} <= {distribution for name, distribution in listed if name == "adabelief"}

    own.fw("train", "tiny.yaml", "train.max_steps=2", "train.run_dir=others")
    assert not imported.exists(), "nobody asked for it"

    train = ("train", "tiny.yaml", "train.max_steps=2", "train.run_dir=run")
    assert "nothing_that_there_is" in own.refusal(*train, "optimizer=broken")
    both = own.refusal(*train, "optimizer=adabelief")
    assert "fw-adabelief" in both and "fw-twin" in both
    assert "99" in own.refusal(*train, "schedule=newer")
    own.fw(*train, "schedule=slow")
    assert imported.exists()
