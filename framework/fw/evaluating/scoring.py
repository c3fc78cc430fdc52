"""How likely a model finds what follows what, by its engine: many at once, and what several begin with is computed once."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fw.errors import UserError
from fw.inference.llm import LLM
from fw.inference.options import Sampling
from fw.inference.results import Result


@dataclass(frozen=True)
class Continuation:
    """Token ids that are scored, ``own``, behind others, ``before``: one of these at least."""

    before: Sequence[int]
    own: Sequence[int]


@dataclass(frozen=True)
class Score:
    """Of a continuation.

    Attributes:
        logprob: natural logarithm of the probability of its tokens together.
        likeliest: whether each of them is the one that greedy generation takes.
    """

    logprob: float
    likeliest: bool


def scores(llm: LLM, asked: Sequence[Continuation], tell: Callable[[], object] = lambda: None) -> list[Score]:
    """Of each continuation; of one that is too long together, as much of ``before`` is left out from its beginning as must be.

    Args:
        tell: is called for each that is computed.

    Raises:
        UserError: one that is longer than the model's context by itself, or has nothing before it.
    """
    context = llm.engine.context
    for each in asked:
        if not each.before or len(each.own) >= context:
            what = "has nothing before it" if not each.before else f"has {len(each.own)} tokens, and the model takes {context} together"
            raise UserError(f"what is to be scored {what}")
    found = {number: Score(0.0, True) for number, each in enumerate(asked) if not each.own}
    others: dict[tuple[int, ...], list[int]] = {}  # what several begin with is in the cache once the first of them is done
    for number, each in enumerate(asked):
        if each.own:
            others.setdefault(tuple(each.before), []).append(number)
    waiting = deque(numbers.pop(0) for numbers in others.values())
    requests: dict[str, int] = {}
    try:
        while waiting or requests:
            while waiting and len(requests) < llm.engine.scheduler.most:
                number = waiting.popleft()
                own = asked[number].own
                ids = [*asked[number].before, *own][-context:]
                llm.engine.add(f"score {number}", ids, _of_last(len(ids) - len(own)))
                requests[f"score {number}"] = number
            for result in llm.step()[1]:
                if (done := requests.pop(result.key, None)) is not None:
                    found[done] = _score(result, asked[done].own)
                    waiting.extendleft(reversed(others.pop(tuple(asked[done].before), [])))
                    tell()
    finally:
        for key in requests:
            llm.engine.abort(key)
    return [found[number] for number in range(len(asked))]


def windows(ids: Sequence[int], prefix: int | None, context: int) -> Iterator[Continuation]:
    """Continuations that have each token of a text once: of full windows with one token before them, of the last one with what fits.

    Args:
        prefix: stands before the first token; where there is none, the first token has no probability, and is not among them.
        context: tokens of a window together.
    """
    begin = 0
    if prefix is None:
        begin = 1
    else:
        begin = min(len(ids), context - 1)
        if begin:
            yield Continuation([prefix], ids[:begin])
    while begin < len(ids):
        end = min(len(ids), begin + context - 1)
        yield Continuation(ids[max(0, end - context) : begin], ids[begin:end])
        begin = end


def _of_last(first: int) -> Sampling:
    return Sampling(max_tokens=0, logprobs=None, prompt_logprobs=1, prompt_logprobs_from=first)


def _score(result: Result, own: Sequence[int]) -> Score:
    if result.error:
        raise UserError(result.error)
    if math.isnan(logprob := sum(result.prompt_logprobs)):
        raise UserError("log-probabilities are no numbers: logits are not finite; inference.dtype=fp32 gives them more range")
    likeliest = all(next(iter(top)) == token for top, token in zip(result.prompt_top_logprobs, own, strict=True))
    return Score(logprob, likeliest)
