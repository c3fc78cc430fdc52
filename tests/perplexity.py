"""Perplexity of a model directory by transformers, on the rows that fw judges by."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F

from fw.kinds.data import IGNORED
from fw.pretrained.calibration import calibration_text

HELD_OUT, LENGTH = 12, 128


def perplexity(directory: Path) -> float:
    """Of :data:`HELD_OUT` rows of :data:`LENGTH` tokens of Python's documentation, in fp32."""
    from transformers import AutoModelForCausalLM

    text = calibration_text(["python-docs"], directory, 1, HELD_OUT, LENGTH, lambda said: None)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(text.held_out_ids_ML).logits
    return math.exp(F.cross_entropy(logits.flatten(0, 1), text.held_out_labels_ML.flatten(), ignore_index=IGNORED))
