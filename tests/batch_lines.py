"""Files of prompts and of answers, a line each."""

from __future__ import annotations

import json
from pathlib import Path


def written(path: Path, lines: list[object]) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def answers(path: Path) -> dict[int, dict]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({one["line"] for one in found}) == len(found), "a line answered twice"
    return {one["line"]: one for one in found}
