"""What requests ask for that takes most."""

from __future__ import annotations

import torch

from fw.inference.options import Sampling
from fw.inference.sequence import Answer, Request

DRAWN = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01}


def answers(count: int, prompt: int, others: float) -> list[Answer]:
    """That are drawn, all but the first one of them at this temperature, to prompts whose log-probabilities are asked for."""
    found = []
    for number in range(count):
        sampling = Sampling(prompt_logprobs=20, **{**DRAWN, "temperature": others if number else 0.7})
        found.append(Answer(Request(str(number), [3] * prompt, sampling, 0, 0, 1), number, 0, [3] * prompt, torch.Generator()))
    return found
