"""fw: train, fine-tune and serve large language models inside a memory budget.

Nothing heavy is imported here, so that ``fw --help`` answers at once; what is asked of it brings in torch then.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from fw.errors import FwError, RunError, UserError

if TYPE_CHECKING:
    from fw.planning.ask import fit, plan, profile
    from fw.planning.llm import LLM
    from fw.planning.run import train
    from fw.pretrained import load_model, save_model
    from fw.registry import register
    from fw.tokenizer import load_tokenizer

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "FwError",
    "RunError",
    "UserError",
    "__version__",
    "fit",
    "load_model",
    "load_tokenizer",
    "plan",
    "profile",
    "register",
    "save_model",
    "train",
]

_FROM = {
    "LLM": "fw.planning.llm",
    "fit": "fw.planning.ask",
    "plan": "fw.planning.ask",
    "profile": "fw.planning.ask",
    "load_model": "fw.pretrained",
    "load_tokenizer": "fw.tokenizer",
    "register": "fw.registry",
    "save_model": "fw.pretrained",
    "train": "fw.planning.run",
}


# torch's profiler, which measures memory here, else says when it begins and ends. It reads this when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _FROM:
        return getattr(importlib.import_module(_FROM[name]), name)
    raise AttributeError(f"module 'fw' has no attribute {name!r}")
