"""What came of hidden states and logits, for whoever asked: embeddings, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fw.inference.sequence import Logprobs, Request


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
