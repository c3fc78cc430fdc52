"""Every one of fw's own plugins passes what third parties' must: `tools/conformance`. The other tests have some of each kind.

Options are those with which the support matrix runs them.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fw.testing.check import suite_of
from matrix.levels import GENERATING, PARTS, prepare

FILES = Path(tempfile.mkdtemp(prefix="fw-conformance-"))
atexit.register(shutil.rmtree, FILES, ignore_errors=True)
prepare(FILES)


def _here(value: Any) -> Any:
    """What names a file names it from anywhere."""
    if isinstance(value, Mapping):
        return {key: _here(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_here(each) for each in value]
    return str(FILES / value) if isinstance(value, str) and (FILES / value).exists() else value


for _kind, _choices in {**PARTS, "kv_cache": GENERATING["kv_cache"]}.items():
    for _level, _choice in _choices.items():
        _name = "tiers" if _kind == "offload" else _level.partition(",")[0]
        _sections = {key: _here(value) for key, value in {**_choice.beside, **_choice.sections}.items() if key != "launch"}
        _label = f"Test_{_kind}_{_level}".replace(", ", "_").replace(" ", "_")
        globals()[_label] = type(_label, (suite_of(_kind, _name, _sections),), {})
