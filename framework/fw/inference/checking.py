"""What of a request can be told to be wrong before it runs."""

from __future__ import annotations

from collections.abc import Sequence

from fw.errors import UserError
from fw.inference.options import Sampling


def check(prompt: Sequence[int], sampling: Sampling, context: int, vocab_size: int, max_sequences: int) -> int:
    """The tokens that each answer may have.

    Args:
        context: tokens of the longest sequence.
        max_sequences: that run at once.

    Raises:
        UserError: the prompt is too long, empty, or has ids that the model does not; or more is asked for than ever fits.
    """
    if not prompt:
        raise UserError("the prompt has no tokens; a model needs one at least, its beginning of a text for one")
    if len(prompt) >= context + (sampling.max_tokens == 0):
        raise UserError(f"the prompt has {len(prompt)} tokens, and prompt and answer together at most {context}")
    for what, ids in (
        ("the prompt", prompt),
        ("logit_bias", sampling.logit_bias),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if strange := [token for token in ids if not 0 <= token < vocab_size]:
            raise UserError(f"{what} has token {strange[0]}, and the model has {vocab_size}")
    if sampling.drawn > max_sequences:
        raise UserError(f"{sampling.drawn} answers are more than run at once, inference.max_sequences: {max_sequences}")
    limit = context - len(prompt)
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    if sampling.min_tokens > limit:
        raise UserError(f"min_tokens: {sampling.min_tokens} are more than the {limit} that the prompt leaves of {context}")
    return limit
