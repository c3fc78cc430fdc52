"""Ctrl-C that comes where nobody handles it."""

from __future__ import annotations

import signal

import pytest

import fw
from fw_plugins.objective.causal_lm import CausalLMObjective


def test_it_is_a_keyboard_interrupt_and_the_next_one_is_heard(workspace, monkeypatch):
    """Lightning would end the process, and leave it deaf to Ctrl-C where somebody prevents that."""

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(CausalLMObjective, "loss_sum", interrupted)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        fw.train("tiny.yaml")
    assert signal.getsignal(signal.SIGINT) == before
