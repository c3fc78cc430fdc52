"""What a process still holds when a verb has ended."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HOLDS = """
import fw.cli

class Holder:
    pass

holder = Holder()
holder.itself = holder
holder.file = open("held.txt", "w")
holder.file.write("all of it")
print("said", end="")
fw.cli._end_quickly()
"""


def test_an_open_file_in_a_cycle_is_written(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HOLDS], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "held.txt").read_text() == "all of it"
    assert done.stdout == "said" and done.stderr == ""
