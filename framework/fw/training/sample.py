"""A sample of text from the model in training, to be read by a person. The inference engine is another thing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fw.kinds.data import Tokenizer
from fw.kinds.head import Head
from fw.kinds.sharding import Stepper


@torch.no_grad()
def sample(
    stepper: Stepper,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    context: int,
    device: torch.device,
    agree: Callable[[int], int],
    temperature: float = 0.8,
    top_k: int = 40,
) -> str:
    """Continue ``prompt`` by up to ``tokens`` tokens; the same text on every rank. Collective where the model is sharded.

    The whole context is computed anew for each token, without a cache.

    Args:
        context: most tokens the model is shown.
        agree: gives every rank the first one's choice, so that ranks whose logits differ in the last bit stop after the same token.
    """
    generator = torch.Generator().manual_seed(0)
    ids = tokenizer.encode(prompt, add_special_tokens=False) or _beginning(tokenizer)
    produced: list[int] = []
    stepper.module.eval()
    with stepper.evaluation():
        for _ in range(tokens):
            window = (ids + produced)[-context:]
            beyond = -len(window) % stepper.length_multiple  # nothing before them sees them
            with stepper.whole_sequences(), stepper.forward_context():
                ids_1L = torch.tensor([window + [0] * beyond], device=device)
                logits_11V = stepper.module(ids_1L, readout=partial(_logits, len(window) - 1))
            logits_V = logits_11V[0, 0].float().cpu()[: tokenizer.vocab_size]
            values, choices = (logits_V / temperature).topk(min(top_k, len(logits_V)))
            choice = int(choices[torch.multinomial(values.softmax(-1), 1, generator=generator)])
            choice = agree(choice)
            if choice == tokenizer.eos_id:
                break
            produced.append(choice)
    return tokenizer.decode(produced, skip_special_tokens=True)


def _logits(of: int, x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
    """Of one token: those of a whole context may take more than a step of training does."""
    logits_B1V: Tensor = head(x_BLD[:, of : of + 1])
    return logits_B1V


def _beginning(tokenizer: Tokenizer) -> list[int]:
    """What stands before a text of nothing: the end of the text before, or its own beginning; where a tokenizer has neither, some id."""
    known = [index for index in (tokenizer.eos_id, tokenizer.bos_id) if index is not None]
    return known[:1] or [0]
