"""`fw plugins new`: packages that pip installs and that pass at once."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import column, environment
from fw import scaffold
from fw.kinds import KINDS

TESTS = Path(__file__).parent
_QUICK = (
    "contract or option or public or pickles or formula or references or updates or add_up or interpolate or prepared or somebody_changes"
    " or lengths or reads_back or seen_by_the_loss or low_rank or nothing_else"
)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of every kind, and `site`, where pip has put them: outside this environment, so that other tests do not see them."""
    place = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        scaffold.write(kind, f"try-{kind}", place / kind)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(place / "site")]
    subprocess.run([*command, *(str(place / kind) for kind in KINDS)], check=True, capture_output=True)
    return place


def of(packages: Path) -> dict[str, str]:
    """The environment in which they are installed."""
    paths = [packages / "site", TESTS, TESTS.parent, os.environ.get("PYTHONPATH", "")]
    return {**environment(), "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}


def pytest_in(packages: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "warm", "-p", "no:cacheprovider", "--import-mode=importlib", *words]
    ended = subprocess.run(command, cwd=packages, env=of(packages), capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0 and " passed" in ended.stdout, ended.stdout + ended.stderr


def test_files_are_short_and_say_what_they_are(packages: Path) -> None:
    for kind in KINDS:
        name = f"fw_try_{kind}.py"
        module, test = packages / kind / name, packages / kind / f"test_{name}"
        assert ast.get_docstring(ast.parse(module.read_text())) and len(test.read_text().splitlines()) < 10
        lines = [line for line in module.read_text().splitlines() if line.strip()]
        assert len(lines) < 60, kind
        assert "$" not in (packages / kind / "README.md").read_text()


def test_what_needs_no_run_passes_for_every_kind(packages: Path) -> None:
    files = [str(packages / kind / f"test_fw_try_{kind}.py") for kind in KINDS]
    pytest_in(packages, *files, "-k", _QUICK)


@pytest.mark.parametrize("kind", ["kv_cache", "model", "schedule"])
def test_all_of_it_passes(packages: Path, kind: str) -> None:
    pytest_in(packages, str(packages / kind / f"test_fw_try_{kind}.py"))


@pytest.mark.parametrize(("kind", "tests"), [("checkpoint", "damaged or old_ones"), ("sharding", "serves_one_rank or planned or bf16")])
def test_what_is_the_kinds_own_passes(packages: Path, kind: str, tests: str) -> None:
    pytest_in(packages, str(packages / kind / f"test_fw_try_{kind}.py"), "-k", tests)


def test_a_run_of_a_model_an_optimizer_and_a_cache_from_elsewhere(workspace: Path, packages: Path) -> None:
    """Planned, trained on two ranks, resumed, and served by the engine; fw is as it was."""

    def fw(*words: str) -> str:
        command = [sys.executable, "-m", "fw", *words]
        ended = subprocess.run(command, capture_output=True, text=True, env=of(packages), timeout=300)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    own = ["model=try-model", "optimizer=try-optimizer", "schedule=try-schedule", "data={name: text, files: [corpus.txt], tokenizer: byte}"]
    planned = json.loads(fw("plan", "tiny.yaml", *own, "--json"))
    assert planned["per_rank"][0]["components_max"]["optimizer_bytes"] == planned["per_rank"][0]["components_max"]["parameters_bytes"]
    fw("train", "tiny.yaml", *own, "train.max_steps=6", "train.run_dir=whole")
    fw("train", "tiny.yaml", *own, "train.max_steps=3", "train.save_every=3", "train.run_dir=halves", "sharding=fsdp", "launch.devices=2")
    fw("train", "tiny.yaml", *own, "train.max_steps=6", "train.save_every=3", "train.run_dir=halves", "resume=auto")
    assert column("halves", "loss") == pytest.approx(column("whole", "loss"), rel=1e-4)
    said = fw("generate", "halves/checkpoints/latest", "a model", "kv_cache=try-kv_cache", "--max-tokens", "5")
    assert said.strip()


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["nonsense", "mine"], "unknown kind 'nonsense'"),
        (["optimizer", "no name"], "is no name for a plugin"),
        (["optimizer", "adamw"], "is fw's; take another name"),
        (["optimizer", "mine", "--dir", "full"], "is there already"),
    ],
)
def test_what_cannot_be_written_is_said(fw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    ended = fw("plugins", "new", *words)
    assert ended.code == 2 and sentence in ended.err
    assert not (tmp_path / "fw-mine").exists()
