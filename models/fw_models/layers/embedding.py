"""Tables of vectors."""

from __future__ import annotations

import torch
from torch import nn


def embedding(rows: int, size: int, padding_idx: int | None = None) -> nn.Embedding:
    """An ``nn.Embedding``. On the meta device nothing is drawn for it: ``normal_`` there imports torch's compiler, which takes as long as
    reading a small model from its files."""
    on_meta = torch.get_default_device().type == "meta"
    return nn.Embedding(rows, size, padding_idx, _weight=torch.empty(rows, size) if on_meta else None)
