"""docs/plugins.md, block by block, in an empty directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import own_cache

DOCUMENT = Path(__file__).parents[2] / "docs" / "plugins.md"
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_runs(tmp_path: Path) -> None:
    """Those with a title are files, those of bash are run."""
    python = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{python}{os.pathsep}{os.environ['PATH']}", "FW_CACHE": own_cache(tmp_path / "cache")}
    ran = 0
    for language, title, text in _BLOCK.findall(DOCUMENT.read_text()):
        if title:
            (tmp_path / title).write_text(text)
        elif language == "bash":
            ended = subprocess.run(["bash", "-e", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
            assert ended.returncode == 0, f"{text}\n{ended.stdout}\n{ended.stderr}"
            ran += 1
        elif language == "python":
            compile(text, "docs/plugins.md", "exec")
    assert ran == 5 and (tmp_path / "run" / "checkpoints").is_dir() and (tmp_path / "slow-start" / "pyproject.toml").is_file()
