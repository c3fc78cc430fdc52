"""What came of hidden states and logits, for whoever asked: embeddings, log-probabilities."""

from __future__ import annotations

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


def tell_prompt(request: Request, begin: int, rows_RV: Tensor) -> None:
    """Log-probabilities of the tokens that follow those at ``begin`` and after, as far as they are the prompt's and not known yet."""
    told, top = request.prompt_logprobs, request.sampling.prompt_logprobs or 0
    first = request.sampling.prompt_logprobs_from + len(told.chosen)
    rows_RV = rows_RV[max(0, first - 1 - begin) : max(0, len(request.prompt) - 1 - begin)]
    if not len(rows_RV):
        return
    ids_R1 = torch.tensor(request.prompt[first : first + len(rows_RV)], device=rows_RV.device)[:, None]
    norms_R1 = rows_RV.logsumexp(-1, keepdim=True)
    told.chosen += (rows_RV.gather(-1, ids_R1) - norms_R1).flatten().tolist()
    if top:
        values_Rt, likeliest_Rt = rows_RV.topk(min(top, rows_RV.shape[-1]))
        both = zip(likeliest_Rt.tolist(), (values_Rt - norms_R1).tolist(), strict=True)
        told.top += [dict(zip(ids, values, strict=True)) for ids, values in both]


def tell(told: Logprobs, chosen: float, own_V: Tensor | None, top: int) -> None:
    """Of one more token the log-probability, and of all as many of the likeliest ones."""
    told.chosen.append(chosen)
    if top:
        assert own_V is not None
        values, ids = own_V.topk(min(top, len(own_V)))
        told.top.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
