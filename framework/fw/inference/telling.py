"""What came of hidden states and logits, for whoever asked: embeddings, log-probabilities, and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fw.inference.results import Completion, Result
from fw.inference.sampling import NO_TOKEN, NOT_FINITE
from fw.inference.sequence import Answer, Logprobs, Request


def pool(request: Request, rows_RD: Tensor, begins: bool) -> None:
    """Hidden states of a stretch's tokens, as many as are wanted."""
    if not rows_RD.numel():
        return
    if begins or request.hidden_D is None or request.pooling == "last":
        request.hidden_D = rows_RD.sum(0)
    else:
        request.hidden_D += rows_RD.sum(0)


def embedding(request: Request) -> list[float]:
    """Of its prompt; empty where none was asked for."""
    if request.hidden_D is None:
        return []
    mean_D = request.hidden_D / (len(request.prompt) if request.pooling == "mean" else 1)
    return mean_D.tolist()


def tell_prompt(request: Request, rows_RV: Tensor) -> None:
    """Log-probabilities of the prompt's next tokens that are not known yet, as many as there are rows: the logits before each."""
    told, first = request.prompt_logprobs, request.prompt_told
    logprobs_R, top = scores(rows_RV, request.prompt[first : first + len(rows_RV)], request.sampling.prompt_logprobs or 0)
    told.chosen += logprobs_R.tolist()
    if top is not None:
        ids, values = (each_Rt.tolist() for each_Rt in top)
        told.top += [dict(zip(*each, strict=True)) for each in zip(ids, values, strict=True)]


def scores(rows_RV: Tensor, tokens: Sequence[int], top: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Log-probabilities ``[R]`` of tokens by logits; ids and log-probabilities ``[R, top]`` of the likeliest, where some are asked for."""
    ids_R1 = torch.tensor(tokens, device=rows_RV.device)[:, None]
    norms_R1 = rows_RV.logsumexp(-1, keepdim=True)
    logprobs_R = (rows_RV.gather(-1, ids_R1) - norms_R1).flatten()
    if not top:
        return logprobs_R, None
    values_Rt, likeliest_Rt = rows_RV.topk(min(top, rows_RV.shape[-1]))
    return logprobs_R, (likeliest_Rt, values_Rt - norms_R1)


def tell(told: Logprobs, chosen: float, own_V: Tensor | None, top: int) -> None:
    """Of one more token the log-probability, and of all as many of the likeliest ones."""
    told.chosen.append(chosen)
    if top:
        assert own_V is not None
        values, ids = own_V.topk(min(top, len(own_V)))
        told.top.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))


def blame(answer: Answer, strange: bool) -> None:
    """For no token: the model, whose logits are no numbers, or what was asked of it."""
    request = answer.request
    if strange:
        request.error = request.fault = NOT_FINITE
    elif request.error is None:
        request.error = (None if answer.form is None else answer.form.error) or NO_TOKEN


def result_of(request: Request, texts: Mapping[int, str]) -> Result:
    """Of one whose answers have ended.

    Args:
        texts: of the answers, by their numbers.
    """
    sampling, answers = request.sampling, request.answers
    if sampling.drawn > sampling.n:
        answers = sorted(answers, key=lambda each: -each.total / max(1, each.generated))[: sampling.n]
    completions = []
    for index, answer in enumerate(answers):
        assert answer.finish_reason is not None
        asked = answer.logprobs if sampling.logprobs is not None else Logprobs()
        text, reason = texts[answer.number], answer.finish_reason
        completions.append(Completion(index, text, answer.own, asked.chosen, asked.top, reason, answer.stopped_by))
    return Result(
        request.key,
        request.prompt,
        completions,
        request.prompt_logprobs.chosen,
        request.prompt_logprobs.top,
        request.cached,
        embedding(request),
        request.error,
        request.fault,
        sum(answer.generated for answer in request.answers),
    )
