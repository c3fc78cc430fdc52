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

from fw.testing import OffloadSuite, OptimizerSuite
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


_OF_VARYING_LENGTH = ("test_sums_and_counts_add_up_over_samples", "test_gradients_add_up_as_the_sums_do", "test_what_is_to_be_ignored_is")
_SAID: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("model", "gpt2"): {"options": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    ("objective", "distill"): {"tree": {"data": {"name": "synthetic", "vocab_size": 259, "samples": 96}}},
    ("objective", "dpo"): dict.fromkeys(_OF_VARYING_LENGTH),  # of pairs, by adapters: tests/plugins/test_dpo.py
    ("sharding", "single"): {"ranks": 1},
    **{
        ("optimizer", f"paged_{name}"): {"capabilities": set(OptimizerSuite.probes) - {"offload"}} for name in ("adamw_8bit", "adamw_32bit")
    },
    ("offload", "parameters to the host"): {"capabilities": set(OffloadSuite.probes) - {"ddp"}},
    ("peft", "prompt"): {"begins_as_base": False},
    ("peft", "prefix"): {"begins_as_base": False},
    **{("quantization", name): {"options": {"group_size": 8}} for name in ("w4a16", "w8a16", "qat")},
    ("precision", "fp16"): {"plan_tolerance": 0.2},  # products of few halves are made in memory of their own, as the processor needs it
    ("kv_cache", "quantized"): {"tolerance": 0.05},
    ("kv_cache", "sliding_window"): {"window": 16},
}
"""What a class says that tests a plugin, beside its name; None for a test that is none of it."""

for _kind, _choices in {**PARTS, "kv_cache": GENERATING["kv_cache"]}.items():
    for _level, _choice in _choices.items():
        _name = "tiers" if _kind == "offload" else _level.partition(",")[0]
        _sections = {key: _here(value) for key, value in {**_choice.beside, **_choice.sections}.items() if key != "launch"}
        _label = f"Test_{_kind}_{_level}".replace(", ", "_").replace(" ", "_")
        globals()[_label] = type(_label, (suite_of(_kind, _name, _sections),), dict(_SAID.get((_kind, _level), {})))
