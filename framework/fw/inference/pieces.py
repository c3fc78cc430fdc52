"""What a step computes of an answer, and whether the next one can be begun without having seen its token."""

from __future__ import annotations

from fw.inference.cached import Piece
from fw.inference.sequence import Answer
from fw.kinds.kv_cache import Stretch


def goes_on_simply(answer: Answer, stretch: Stretch) -> bool:
    """Whether all that is to be known before its next step is what it is given here: one token, which the device can choose by itself."""
    request = answer.request
    sampling = request.sampling
    changed = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias
    told = sampling.logprobs or request.wants_prompt or request.pooling is not None
    whole = stretch.end == len(answer.tokens) and not answer.copies and request.adapter is None and request.limit > 0
    return whole and not changed and not told and answer.form is None and answer.generated >= sampling.min_tokens


def piece_of(answer: Answer, stretch: Stretch) -> Piece:
    """Rows of which log-probabilities of the prompt are wanted, else the last one where it is the last of all."""
    last = stretch.end >= len(answer.tokens)
    guesses = max(0, stretch.end - len(answer.tokens))
    tokens = [*answer.tokens[stretch.start : stretch.end], *answer.guessed[:guesses]]
    if (pooling := answer.request.pooling) is not None:
        first = 0 if pooling == "mean" else stretch.length - last
        return Piece(stretch, tokens, range(0), answer.request.adapter, range(first, stretch.length))
    first = stretch.length - last - guesses
    if answer.request.wants_prompt:
        first = min(first, max(0, answer.request.sampling.prompt_logprobs_from - 1 - stretch.start))
    return Piece(stretch, tokens, range(first, stretch.length), answer.request.adapter)
