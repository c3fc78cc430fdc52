"""How far long work has come: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest

from fw import bars
from fw.bars import Bar


class Stream(io.StringIO):
    terminal = False

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> Stream:
    monkeypatch.delenv("RANK", raising=False)
    stream = Stream()
    monkeypatch.setattr(bars, "sys", SimpleNamespace(stderr=stream))  # pytest's own takes its place between phases of a test
    return stream


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its one number is the time, and goes on when it is changed."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def test_a_line_every_ten_seconds(stderr: Stream, clock: list[float]) -> None:
    with Bar(total=40, desc="verifying", unit=" files") as bar:
        for _ in range(40):
            clock[0] += 1
            bar.update()
    lines = stderr.getvalue().splitlines()
    assert lines[0] == "verifying: 25%, 10 of 40 files, 00:30 left" and len(lines) == 4
    assert not any(character in stderr.getvalue() for character in "\r\x1b█")


def test_of_what_has_no_known_end_and_of_bytes(stderr: Stream, clock: list[float]) -> None:
    with Bar(desc="planning", unit="B", unit_scale=True) as bar:
        bar.set_postfix_str("the 3rd", refresh=False)
        clock[0] += 75
        bar.update(2_500_000)
    assert stderr.getvalue() == "planning: 2.50MB, 01:15 so far, the 3rd\n"


def test_short_work_and_other_ranks_are_silent(stderr: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(Bar(range(5), desc="quick")) == [0, 1, 2, 3, 4] and stderr.getvalue() == ""
    monkeypatch.setattr(bars, "SECONDS_BETWEEN_LINES", 0.0)
    list(Bar(range(5), desc="quick", shown=False))
    monkeypatch.setenv("RANK", "3")
    list(Bar(range(5), desc="quick"))
    assert stderr.getvalue() == ""
    monkeypatch.setenv("RANK", "0")
    list(Bar(range(5), desc="quick"))
    assert "quick: " in stderr.getvalue()


def test_a_terminal_has_a_bar(stderr: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr.terminal = True
    with Bar(total=4, desc="verifying", delay=0, mininterval=0) as bar:
        bar.update(2)
    assert "verifying:  50%|" in stderr.getvalue() and "\r" in stderr.getvalue()
