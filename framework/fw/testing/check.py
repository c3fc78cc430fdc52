"""The tests of a plugin's kind, from the command line."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fw import registry
from fw.errors import EXIT_FAILED, EXIT_OK, UserError, did_you_mean
from fw.kinds import KINDS, plugin_class
from fw.registry import OWN, Entry
from fw.testing import SUITES


def check(kind: str | None, name: str | None, sections: Mapping[str, Any]) -> int:
    """Run them for one plugin, those of a kind, or all that are not fw's own; a line for each test and a verdict for each plugin.

    Args:
        sections: of a config; options of the plugin under its kind, and what else a run with it needs.

    Returns:
        0 where all pass, else 1.

    Raises:
        UserError: there is no such plugin.
    """
    entries = [entry for each in KINDS for entry in registry.entries(each) if kind in (None, each) and name in (None, entry.name)]
    if name is not None and not entries:
        names = [entry.name for entry in registry.entries(kind or "")]
        raise UserError(f"there is no {kind} '{name}'{did_you_mean(name, names)} (there are: {', '.join(names)})")
    if name is None:
        entries = [entry for entry in entries if entry.distribution != OWN]
    if not entries:
        raise UserError("no plugins but fw's own are installed; name one of these to check it: fw plugins check KIND NAME")
    here = {key: _from_anywhere(value) if isinstance(value, Mapping) else value for key, value in sections.items()}
    return max(_verdict(entry, here) for entry in entries)


def _from_anywhere(value: Any) -> Any:
    """Runs have directories of their own: an option that is a file here names it in full."""
    if isinstance(value, Mapping):
        return {key: each if key == "name" else _from_anywhere(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_from_anywhere(each) for each in value]
    return str(Path(value).resolve()) if isinstance(value, str) and value and Path(value).exists() else value


def _verdict(entry: Entry, sections: Mapping[str, Any]) -> int:
    listed = registry.inspect(entry, KINDS[entry.kind].apis)
    print(f"{entry.kind} '{entry.name}' of {entry.distribution} {entry.version}")
    if not listed.available:
        print(f"  {listed.problem}\n  not usable\n")
        return EXIT_FAILED
    plugin = plugin_class(KINDS[entry.kind].load_contract(), entry.name)
    told = _Told()
    with tempfile.TemporaryDirectory(prefix="fw-check-") as place:
        file = Path(place) / "test_plugin.py"
        suite = f"suite_of({entry.kind!r}, {entry.name!r}, {sections!r})"
        file.write_text(f"from fw.testing.check import suite_of\n\n\nclass TestPlugin({suite}):\n    pass\n")
        options = ["-p", "no:cacheprovider", "-p", "no:terminal", f"--rootdir={place}"]
        try:
            ended = pytest.main([str(file), *options], plugins=[told])
        except Exception:  # pytest ends an interrupted session by its terminal, which is not there
            if not told.interrupted:
                raise
    if told.interrupted:
        raise KeyboardInterrupt
    passes = told.counts["failed"] == 0 and ended in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    counts = ", ".join(f"{number} {what}" for what, number in told.counts.items() if number)
    print(f"  {plugin.__qualname__} {'passes' if passes else 'does not pass'}: {counts}\n")
    return EXIT_OK if passes else EXIT_FAILED


def suite_of(kind: str, name: str, sections: Mapping[str, Any]) -> type:
    """The kind's suite, of a plugin as it is installed; options of it in ``sections``, and what else a run needs."""
    plugin = plugin_class(KINDS[kind].load_contract(), name)
    own = sections.get(kind, {})
    options = {key: value for key, value in own.items() if key != "name"} if isinstance(own, Mapping) else {}
    tree = {section: value for section, value in sections.items() if section != kind}
    return type("Suite", (SUITES[kind],), {"plugin": plugin, "options": options, "tree": tree})


class _Told:
    """Tests as they end, in words."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.interrupted = False

    def pytest_keyboard_interrupt(self) -> None:
        """The user has had enough."""
        self.interrupted = True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A line of each."""
        if report.when != "call" and report.passed:
            return
        outcome = "passed" if report.passed else "skipped" if report.skipped else "failed"
        self.counts[outcome] += 1
        words = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        print(f"  {'ok' if report.passed else '--' if report.skipped else 'NO':<3} {words}", flush=True)
        if report.failed:
            reason = getattr(report.longrepr, "reprcrash", None)
            text = str(reason.message if reason is not None else report.longrepr)
            print("\n".join(f"        {line}" for line in text.splitlines()[:12]), flush=True)
