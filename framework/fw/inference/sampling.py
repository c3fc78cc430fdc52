"""From logits to tokens. A row's choice depends on the row and its request alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fw.inference.options import Sampling
from fw.inference.sequence import Answer


def gathered(rows: Sequence[Tensor], asked: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Logits ``[B, V]`` of rows ``[V]``; of those that are asked for, log-probabilities ``[A, V]`` under the model itself."""
    logits_BV = torch.stack(list(rows))
    if not asked:
        return logits_BV, None
    return logits_BV, (logits_BV if len(asked) == len(rows) else logits_BV[asked]).log_softmax(-1)


@dataclass(frozen=True)
class Chosen:
    """What came of rows of logits.

    Attributes:
        tokens: one of each row.
        logprobs: of these under the model itself, by the number of the row, where they were asked for.
        own_AV: all log-probabilities of such rows, in order; None where there are none.
    """

    tokens: list[int]
    logprobs: dict[int, float]
    own_AV: Tensor | None


def choose(rows: Sequence[Tensor], answers: Sequence[Answer], asked: Sequence[int], ends: frozenset[int]) -> Chosen:
    """A token for each row. Where none is drawn, what is found out comes from the device at once.

    Args:
        rows: logits ``[V]`` in fp32.
        answers: whose next token each row is of.
        asked: rows whose log-probabilities are wanted.
        ends: ids that end a text, for the model.
    """
    logits_BV, own_AV = gathered(rows, asked)
    change(logits_BV, answers, ends)
    best_B = logits_BV.argmax(-1)
    drawn = {row: answer for row, answer in enumerate(answers) if not answer.request.sampling.greedy}
    if own_AV is None or drawn:
        tokens: list[int] = best_B.tolist()
        for row, answer in drawn.items():
            tokens[row] = _draw(probabilities(logits_BV[row], answer.request.sampling), answer.generator)
        if own_AV is None:
            return Chosen(tokens, {}, None)
        of_A = torch.tensor([tokens[row] for row in asked], device=own_AV.device)
        told = own_AV.gather(1, of_A[:, None])[:, 0].tolist()
    else:
        of_A = best_B if len(asked) == len(rows) else best_B[asked]
        # Numbers of tokens are exact in fp64, and log-probabilities stay what they are.
        found = torch.cat([best_B.double(), own_AV.gather(1, of_A[:, None])[:, 0].double()]).tolist()
        tokens, told = [int(token) for token in found[: len(rows)]], found[len(rows) :]
    return Chosen(tokens, dict(zip(asked, told, strict=True)), own_AV)


def probabilities(logits_V: Tensor, sampling: Sampling) -> Tensor:
    """What a token is drawn by: temperature, then the likeliest by number, by their sum, and beside the likeliest one."""
    logits_V = logits_V / sampling.temperature
    if 0 < sampling.top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        ordered_V, which_V = logits_V.sort(descending=True, stable=True)
        before_V = ordered_V.softmax(-1).cumsum(-1).roll(1)
        before_V[0] = 0
        logits_V = logits_V.index_fill(0, which_V[before_V >= sampling.top_p], -torch.inf)
    if sampling.min_p > 0:
        p_V = logits_V.softmax(-1)
        logits_V = logits_V.masked_fill(p_V < sampling.min_p * p_V.max(), -torch.inf)
    return logits_V.softmax(-1)


def _draw(p_V: Tensor, generator: torch.Generator | None) -> int:
    """The token in whose part of the sum a number from 0 to 1 falls."""
    sums_V = p_V.double().cumsum(-1)
    at = torch.rand((), generator=generator, dtype=torch.float64).to(sums_V.device) * sums_V[-1]
    index = int(torch.searchsorted(sums_V, at, right=True))
    return min(index, int(p_V.nonzero()[-1]))


def change(logits_BV: Tensor, answers: Sequence[Answer], ends: frozenset[int]) -> None:
    """In place, what requests want of logits, whatever way they choose."""
    for row, answer in enumerate(answers):
        sampling = answer.request.sampling
        penalties = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        if penalties or sampling.logit_bias or answer.form is not None or answer.generated < sampling.min_tokens:
            _change(logits_BV[row], answer, ends)


def _change(logits_V: Tensor, answer: Answer, ends: frozenset[int]) -> None:
    sampling = answer.request.sampling
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(answer.tokens)), device=logits_V.device)
        of_seen = logits_V[seen]
        logits_V[seen] = torch.where(of_seen > 0, of_seen / sampling.repetition_penalty, of_seen * sampling.repetition_penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and answer.generated:
        counts = Counter(answer.own)
        seen = torch.tensor(list(counts), device=logits_V.device)
        times = torch.tensor(list(counts.values()), device=logits_V.device, dtype=logits_V.dtype)
        logits_V[seen] -= sampling.presence_penalty + sampling.frequency_penalty * times
    for token, bias in sampling.logit_bias.items():
        logits_V[token] += bias
    if answer.form is not None:
        logits_V.masked_fill_(~answer.form.allowed(len(logits_V)).to(logits_V.device), -torch.inf)
    if answer.generated < sampling.min_tokens and (stops := [*ends, *sampling.stop_token_ids]):
        others_V = logits_V.index_fill(0, torch.tensor(stops, device=logits_V.device), -torch.inf)
        if others_V.max() > -torch.inf:  # a form that is whole can only end
            logits_V.copy_(others_V)
