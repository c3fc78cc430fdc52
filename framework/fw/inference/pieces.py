"""What a step computes of an answer, and whether the next one can be begun without having seen its token."""

from __future__ import annotations

from functools import partial

from fw.inference.cached import Piece
from fw.inference.sequence import Answer
from fw.inference.telling import tell_prompt
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
    """The last row is wanted where it is the last of all; those before are scored where log-probabilities of the prompt are asked for."""
    request = answer.request
    last = stretch.end >= len(answer.tokens)
    guesses = max(0, stretch.end - len(answer.tokens))
    tokens = [*answer.tokens[stretch.start : stretch.end], *answer.guessed[:guesses]]
    if request.pooling is not None:
        first = 0 if request.pooling == "mean" else stretch.length - last
        return Piece(stretch, tokens, range(0), request.adapter, range(first, stretch.length))
    wanted = range(stretch.length - last - guesses, stretch.length)
    if not request.wants_prompt:
        return Piece(stretch, tokens, wanted, request.adapter)
    first = max(0, request.prompt_told - 1 - stretch.start)
    end = max(first, min(stretch.length, len(request.prompt) - 1 - stretch.start))
    return Piece(stretch, tokens, wanted, request.adapter, scored=range(first, end), score=partial(tell_prompt, request))
