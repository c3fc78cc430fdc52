"""Rows of text that a model is looked at with: some that it may be fitted to, others that it is judged by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fw.errors import UserError
from fw.kinds import make
from fw.kinds.data import DataPlugin, Samples, Say

PYTHON_DOCS = "python-docs"


@dataclass(frozen=True)
class CalibrationText:
    """Of two splits that share no document.

    Attributes:
        ids_NL: to be fitted to.
        held_out_ids_ML, held_out_labels_ML: to be judged by.
    """

    ids_NL: Tensor
    held_out_ids_ML: Tensor
    held_out_labels_ML: Tensor


def calibration_text(text: Sequence[str], tokenizer: Path, rows: int, held_out: int, length: int, tell: Say) -> CalibrationText:
    """Rows of ``length`` tokens, evenly over the text; fewer where there are no more.

    Args:
        text: files or globs, or :data:`PYTHON_DOCS` alone.
        tokenizer: directory of it.

    Raises:
        UserError: the text is missing, or too short for a row.
    """
    chosen: dict[str, Any] = {"source": PYTHON_DOCS} if list(text) == [PYTHON_DOCS] else {"files": list(text)}
    plugin = make(DataPlugin, "text", **chosen, tokenizer=str(tokenizer))
    try:
        plugin.prepare(tell)
        corpus = plugin.open(length)
    except UserError as error:
        raise UserError(f"--text: {str(error).replace('train.sequence_length', '--length')}") from None
    ids_NL, _ = _rows(corpus.train, rows, "calibration")
    held_out_ids_ML, labels_ML = _rows(corpus.val, held_out, "perplexity")
    for what, asked, found in (("calibration", rows, len(ids_NL)), ("perplexity", held_out, len(labels_ML))):
        if found < asked:
            tell(f"the text has {found:,} rows of {length} tokens for {what}, where {asked:,} were asked for")
    return CalibrationText(ids_NL, held_out_ids_ML, labels_ML)


def _rows(samples: Samples, count: int, what: str) -> tuple[Tensor, Tensor]:
    found = min(count, len(samples))
    if not found:
        raise UserError(f"--text: there is no whole row for {what}; give more text, or a smaller --length")
    chosen = [samples[place * len(samples) // found] for place in range(found)]
    return torch.stack([each["input_ids"] for each in chosen]), torch.stack([each["labels"] for each in chosen])
