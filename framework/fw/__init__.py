"""fw: train, fine-tune and serve large language models inside a memory budget.

Nothing heavy is imported here, so that ``fw --help`` answers at once; :func:`train` brings in torch when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fw.errors import FwError, RunError, UserError

if TYPE_CHECKING:
    from fw.training.run import train

__version__ = "0.1.0"
__all__ = ["FwError", "RunError", "UserError", "__version__", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":
        from fw.training.run import train

        return train
    raise AttributeError(f"module 'fw' has no attribute {name!r}")
