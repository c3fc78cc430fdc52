"""Whom a launcher passes signals on to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fw_plugins.launcher.local import _forward_signals, _StoppedBeforeRanks


def test_processes_that_were_there_before_are_not_the_runs() -> None:
    """A program that trains through Python has its own."""
    words = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as own:
        with pytest.raises(_StoppedBeforeRanks), _forward_signals():
            os.kill(os.getpid(), signal.SIGTERM)
        with _forward_signals() as asked, subprocess.Popen(words, stdin=subprocess.PIPE) as rank:
            os.kill(os.getpid(), signal.SIGTERM)
            assert rank.wait(60) == -signal.SIGTERM and asked == [signal.SIGTERM]
        assert own.poll() is None
        own.communicate()
        assert own.returncode == 0
