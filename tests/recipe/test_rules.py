"""What plugins declare of each other."""

from __future__ import annotations

import pytest

from fw.config import load
from fw.errors import UserError
from fw.recipe import resolve
from fw.registry import Conflicts, Requires
from fw_plugins.optimizer.sgd import SGD
from fw_plugins.precision.bf16 import BF16


def test_a_conflict_is_refused_from_either_side(workspace, monkeypatch):
    rule = Conflicts("optimizer", ("sgd",), "their roundings add up")
    monkeypatch.setattr(BF16, "conflicts", (rule,))
    with pytest.raises(
        UserError,
        match=r"override precision=bf16: precision 'bf16' does not work with optimizer 'sgd', because their roundings",
    ):
        resolve(load("tiny.yaml", ["precision=bf16", "optimizer=sgd"]))
    assert resolve(load("tiny.yaml", ["precision=bf16"]))


def test_a_requirement_is_checked(workspace, monkeypatch):
    monkeypatch.setattr(SGD, "requires", (Requires("precision", ("fp32", "bf16"), "it keeps no master weights"),))
    with pytest.raises(
        UserError,
        match=r"needs precision 'fp32' or 'bf16', because it keeps no master weights; the config has bf16_true",
    ):
        resolve(load("tiny.yaml", ["precision=bf16_true", "optimizer=sgd"]))
    assert resolve(load("tiny.yaml", ["optimizer=sgd"]))
