"""Plugins that are wrong in one way each, and the test that says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment

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


def check(place: Path, source: str, capabilities: str, *words: str) -> subprocess.CompletedProcess[str]:
    (place / "tried.py").write_text(source)
    (place / "test_tried.py").write_text(TEST.format(capabilities=capabilities))
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


def test_a_capability_that_is_not_declared_must_be_refused(tmp_path: Path) -> None:
    ended = check(tmp_path, SOUND, '{"ddp"}', "-k", "capabilities and fsdp")
    assert ended.returncode == 1 and "'fsdp' is not among its capabilities, but works; declare it" in ended.stdout
