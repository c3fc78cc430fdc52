"""Tests of launchers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from fw.api import LaunchSection, UserError
from fw.testing.suite import PluginSuite


class LauncherSuite(PluginSuite):
    """How ranks start: each with torchrun's variables, and how they end is how the run ends.

    Attributes:
        starts: whether it starts ranks in place; else it must say what to do.
    """

    starts: ClassVar[bool] = True

    def launched(self, directory: Path, program: str, ranks: int = 2) -> int:
        """The exit code of ranks that run a program."""
        file = directory / "rank.py"
        file.write_text(program)
        command, launch = [sys.executable, str(file)], LaunchSection(devices=ranks)
        return int(self.make().launch(command, launch, lambda attempt: {"FW_TESTING": str(attempt)}))

    def test_every_rank_knows_who_it_is(self, tmp_path: Path) -> None:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FW_TESTING")
        program = (
            f"import json, os\nvalues = {{name: os.environ.get(name) for name in {names}}}\n"
            f"open(os.path.join({str(tmp_path)!r}, 'rank' + os.environ['RANK']), 'w').write(json.dumps(values))\n"
        )
        if not self.starts:
            with pytest.raises(UserError):
                self.launched(tmp_path, program)
            return
        assert self.launched(tmp_path, program) == 0
        told = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
        assert [each["RANK"] for each in told] == ["0", "1"] and {each["WORLD_SIZE"] for each in told} == {"2"}
        assert all(all(each.values()) for each in told) and told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"]

    def test_a_rank_that_fails_ends_the_run(self, tmp_path: Path) -> None:
        if not self.starts:
            pytest.skip("it starts no ranks")
        program = "import os, signal, sys\nif os.environ['RANK'] == '1':\n    sys.exit(1)\nsignal.pause()\n"
        before = dict(os.environ)
        assert self.launched(tmp_path, program) != 0
        assert dict(os.environ) == before, "and leaves the environment as it was"
