"""`--help` of every verb: examples that are understood; and colours where they are wanted."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import REPOSITORY
from fw.cli import VERBS, actions_of, colour, parsed, whole_parser

ROOT = whole_parser()


def _all() -> Iterator[argparse.ArgumentParser]:
    for verb in actions_of(ROOT).values():
        below = actions_of(verb)
        yield verb
        yield from below.values()


PARSERS = {parser.prog: parser for parser in _all()}
EXAMPLES = sorted(
    {
        line.strip()
        for parser in PARSERS.values()
        for line in (parser.epilog or "").replace("\\\n", " ").splitlines()
        if line.strip().startswith("fw ")
    }
)


def test_every_verb_is_there() -> None:
    assert set(actions_of(ROOT)) == set(VERBS)
    assert {"fw data prepare", "fw checkpoint verify", "fw plugins check"} <= set(PARSERS) and len(EXAMPLES) > 60


@pytest.mark.parametrize("prog", PARSERS)
def test_help_has_examples_of_its_own(prog: str) -> None:
    told = PARSERS[prog].format_help()
    assert "examples:\n" in told
    assert [line for line in told.partition("examples:\n")[2].splitlines() if line.strip().startswith(prog)]


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_are_understood(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0].partition(" | ")[0], comments=True)[1:]
    parsed(words)
    for word in words:
        if word.startswith("configs/"):
            assert (REPOSITORY / word).is_file(), word


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
    ],
)
def test_colours(monkeypatch: pytest.MonkeyPatch, terminal: bool, variables: dict[str, str], coloured: bool) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert colour.wanted() is coloured


def test_verbs_that_colour_ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fw.cli import doctor
    from fw.doctor.finding import Finding

    for wanted in (True, False):
        monkeypatch.setattr(colour, "wanted", lambda answer=wanted: answer)
        doctor._tell(Finding("disk", "ok", "all is well"))
        assert ("\x1b[" in capsys.readouterr().out) is wanted
    sources = [path.read_text() for path in Path(colour.__file__).parent.rglob("*.py") if path.name != "colour.py"]
    assert not any("NO_COLOR" in source for source in sources), "asked in one place"
