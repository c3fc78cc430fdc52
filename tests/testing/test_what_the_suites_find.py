"""Plugins that are wrong in one way each, and the test that says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment
from fw import scaffold

SOUND = '''
"""An optimizer."""

from dataclasses import dataclass

import torch

import fw
from fw.api import OptimizerOptions, OptimizerPlugin, OptimizerSpec, UserError


@dataclass
class Options(OptimizerOptions):
    """Options."""

    lr: float = 1e-3
    """Step size."""


class Update(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight)
                state["mean"].lerp_(weight.grad, 0.1)
                weight.add_(state["mean"], alpha=-group["lr"])


@fw.register("tried")
class Tried(OptimizerPlugin):
    """Gradient descent with momentum."""

    api = 1
    Config = Options

    def spec(self, device):
        return OptimizerSpec(Update, self.config.lr)
'''
TEST = """
from fw import testing


class TestTried(testing.OptimizerSuite):
    plugin = testing.from_file("tried.py", "tried")
    capabilities = {capabilities}
"""
WRONG = {
    "an option without a sentence": ('    """Step size."""\n', "", "test_every_option_has_a_type_and_a_sentence"),
    "no docstring": ('    """Gradient descent with momentum."""\n', "", "test_it_fills_the_contract_and_says_what_it_is"),
    "an option called name": (
        "    lr: float",
        '    name: str = ""\n    """A name."""\n    lr: float',
        "test_no_option_is_called_as_the_plugin_is",
    ),
    "something private": ("import fw\n", "import fw\nimport fw.assemble\n", "test_it_uses_of_fw_what_is_public"),
    "pickles": ("import torch\n", "import pickle\n\nimport torch\n", "test_it_pickles_nothing"),
    "state that is no tensor": (
        "state = self.state[weight]",
        "state = self.state[weight]; state.setdefault('n', 0)",
        "test_its_state_is_tensors",
    ),
    "a parameter without a gradient moves": (
        "                if weight.grad is None:\n                    continue\n",
        "                if weight.grad is None:\n                    weight.add_(1)\n                    continue\n",
        "test_a_parameter_without_a_gradient_is_left_alone",
    ),
    "state that is not saved": (
        'state = self.state[weight]\n                if not state:\n                    state["mean"] = torch.zeros_like(weight)',
        'state = self.__dict__.setdefault("kept", {}).setdefault(id(weight), {"mean": torch.zeros_like(weight)})',
        "test_a_resumed_run_is_one_that_was_never_stopped",
    ),
}


OTHERS = {
    "peft: what trains and nothing sees": (
        "peft",
        "        if not trained:",
        "        model.unseen = __import__('torch').nn.Parameter(__import__('torch').zeros(3))\n"
        "        trained['unseen'] = HFTensor('base_model.model.unseen')\n        if not trained:",
        "test_everything_that_trains_is_seen_by_the_loss",
    ),
    "data: samples that are a view of what is kept": (
        "data",
        "ids = torch.arange(index, index + self._length + 1) % self._numbers",
        "ids = self.__dict__.setdefault('kept', {}).setdefault(index, torch.arange(index + 1, index + self._length + 2) % self._numbers)",
        "test_a_sample_that_somebody_changes_is_whole_the_next_time",
    ),
    "data: what differs each time": (
        "data",
        'f"${NAME}-{number}"'.replace("${NAME}", "tried"),
        'f"tried-{id(text)}"',
        "test_what_was_prepared_is_not_made_again",
    ),
    "objective: a mean instead of a sum": ("objective", 'reduction="sum"', 'reduction="mean"', "test_gradients_add_up_as_the_sums_do"),
    "checkpoint: what damages nobody finds": (
        "checkpoint",
        "    def optimizer(self, parameters):",
        "    def damages(self, share=(0, 1), progress=print):\n        return []\n\n    def optimizer(self, parameters):",
        "test_what_is_written_is_told_whole_and_what_is_damaged_by_name",
    ),
    "checkpoint: state of half of the parameters": (
        "checkpoint",
        'return PlacedTensors(TensorFiles(self.place, "optimizer"), parameters)',
        'whole = PlacedTensors(TensorFiles(self.place, "optimizer"), parameters)\n'
        "        return {path: whole[path] for path in list(whole)[::5]}",
        "test_weights_and_state_come_back_as_they_went",
    ),
}


def check(place: Path, source: str, capabilities: str, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "tried.py").write_text(source)
    (place / "test_tried.py").write_text(TEST.format(capabilities=capabilities))
    return pytest_of(place, *words)


def pytest_of(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parent
    paths = f"{tests}:{tests.parent}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "warm", "-p", "no:cacheprovider", "test_tried.py", *words]
    return subprocess.run(command, cwd=place, env={**environment(), "PYTHONPATH": paths}, capture_output=True, text=True, timeout=900)


def test_a_sound_one_passes(tmp_path: Path) -> None:
    ended = check(tmp_path, SOUND, "None")
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_found(tmp_path: Path, what: str) -> None:
    before, after, test = WRONG[what]
    assert before in SOUND
    ended = check(tmp_path, SOUND.replace(before, after, 1), "None", "-k", test.removeprefix("test_"))
    assert ended.returncode == 1 and f"::{test}" in ended.stdout, ended.stdout + ended.stderr


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_wrong_in_other_kinds_is_found(tmp_path: Path, what: str) -> None:
    kind, before, after, test = OTHERS[what]
    scaffold.write(kind, "tried", tmp_path / "package")
    (source,) = (tmp_path / "package").glob("fw_*.py")
    text = source.read_text()
    assert before in text
    (tmp_path / "tried.py").write_text(text.replace(before, after, 1) + "\n\nimport fw\n\nfw.register('tried')(Tried)\n")
    suite = {"data": "DataSuite", "peft": "PeftSuite", "objective": "ObjectiveSuite", "checkpoint": "CheckpointSuite"}[kind]
    (tmp_path / "test_tried.py").write_text(TEST.replace("OptimizerSuite", suite).format(capabilities="None"))
    ended = pytest_of(tmp_path, "-k", test.removeprefix("test_"))
    assert ended.returncode == 1 and f"::{test}" in ended.stdout, ended.stdout + ended.stderr


def test_a_capability_that_is_not_declared_must_be_refused(tmp_path: Path) -> None:
    ended = check(tmp_path, SOUND, '{"ddp"}', "-k", "capabilities and fsdp")
    assert ended.returncode == 1 and "'fsdp' is not among its capabilities, but works; declare it" in ended.stdout
