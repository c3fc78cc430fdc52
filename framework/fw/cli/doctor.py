"""Look at this machine as a run would, and say what is wrong and how to mend it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from fw.cli import colour

if TYPE_CHECKING:
    from fw.doctor.finding import Finding

EXAMPLES = """examples:
  fw doctor
  fw doctor --quick          # without measuring the disk and starting ranks
  fw doctor --json"""

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}
_COLOURS = {"ok": "32", "note": "33", "problem": "31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How much, and in which form."""
    parser.add_argument("--quick", action="store_true", help="measure no disk, start no ranks, import no plugin")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Each finding as it comes; 1 where there is a problem."""
    from fw.doctor import hardware, network, software
    from fw.doctor.finding import Check, guarded

    checks: list[tuple[str, Check]] = [
        ("python", software.python),
        ("torch", software.torch_itself),
        ("libraries", software.libraries),
        ("processor", hardware.processor),
        ("gpu", hardware.gpus),
        ("memory", hardware.memory),
        ("disk", partial(hardware.disks, measured=not options.quick)),
        ("kernels", software.compiler),
        ("locks", software.locks),
        ("network", network.interfaces),
        *([] if options.quick else [("collectives", network.collectives)]),
        ("plugins", partial(software.plugins, imported=not options.quick)),
    ]
    found: list[Finding] = []
    for area, check in checks:
        for finding in guarded(area, check):
            found.append(finding)
            if not options.json:
                _tell(finding)
    problems = sum(finding.state == "problem" for finding in found)
    if options.json:
        print(json.dumps([asdict(finding) for finding in found], indent=1, ensure_ascii=False))
    else:
        notes = sum(finding.state == "note" for finding in found)
        print(f"\n{problems or 'no'} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}")
    return 1 if problems else 0


def _tell(finding: Finding) -> None:
    mark = f"{_MARKS[finding.state]:8}"
    if colour.wanted():
        mark = f"\x1b[{_COLOURS[finding.state]}m{mark}\x1b[0m"
    print(f"{mark}{finding.area:12}{finding.text}" + (f"\n{'':20}→ {finding.fix}" if finding.fix else ""), flush=True)
