"""From logits to tokens. A row's choice depends on the row and its request alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fw.inference.options import Sampling
from fw.inference.sequence import Answer, Request
from fw.kernels.choosing import largest

NO_TOKEN = "no token can be chosen: all are ruled out by what was asked for"
NOT_FINITE = "no token can be chosen: the model's logits are not finite; inference.dtype=fp32 gives them more range"


def gathered(rows: Tensor | Sequence[Tensor], asked: Sequence[int], read_only: bool = False) -> tuple[Tensor, Tensor | None]:
    """Logits ``[B, V]`` of that, or of rows ``[V]``; of those that are asked for, log-probabilities ``[A, V]`` under the model itself.

    Args:
        read_only: whether nobody writes to the logits, which then need not be a copy.
    """
    logits_BV = (rows if read_only else rows.clone()) if isinstance(rows, Tensor) else torch.stack(list(rows))
    if not asked:
        return logits_BV, None
    return logits_BV, (logits_BV if len(asked) == len(rows) else logits_BV[asked]).log_softmax(-1)


@dataclass(frozen=True)
class Chosen:
    """What came of rows of logits.

    Attributes:
        tokens: one of each row; None where there is none to choose, since no logit is a number, or all are ruled out.
        logprobs: of these under the model itself, by the number of the row, where they were asked for.
        own_AV: all log-probabilities of such rows, in that order; None where nobody wants more than one.
        strange: rows without a token whose logits are no numbers.
    """

    tokens: list[int | None]
    logprobs: dict[int, float]
    own_AV: Tensor | None
    strange: frozenset[int] = frozenset()

    def own(self, row: int) -> Tensor:
        """All log-probabilities ``[V]`` of a row that was asked for."""
        assert self.own_AV is not None
        return self.own_AV[list(self.logprobs).index(row)]


class Choice:
    """What is being chosen on the device, which the host has not waited for.

    Args:
        tokens_B: one of each row.
        best_B: the largest logit of each row, which is no number where there is no token to choose.
        asked: rows whose log-probabilities are wanted.
        own_AV: these, in order.
        whole: whether of more than the tokens; else they are gone when those are known.
    """

    def __init__(self, tokens_B: Tensor, best_B: Tensor, asked: Sequence[int], own_AV: Tensor | None, whole: bool) -> None:
        self.tokens_B, self._best_B = tokens_B, best_B
        self._asked, self._own_AV = asked, own_AV if whole else None
        found = tokens_B.where(best_B.isfinite(), -1)
        if own_AV is not None:
            of_A = tokens_B if len(asked) == len(tokens_B) else tokens_B[to_device(asked, tokens_B.device)]
            # Numbers of tokens are exact in fp64, and log-probabilities stay what they are.
            found = torch.cat([found.double(), own_AV.gather(1, of_A[:, None])[:, 0].double()])
        self._found = found
        self._event: torch.cuda.Event | None = None
        if found.is_cuda:
            self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> None:
        """Until it is there."""
        if self._event is not None:
            self._event.synchronize()

    def told(self) -> Chosen:
        """What it is."""
        self.wait()
        found = self._found.tolist()
        count = len(self.tokens_B)
        tokens = [int(token) if token >= 0 else None for token in found[:count]]
        strange: frozenset[int] = frozenset()
        if None in tokens:
            strange = frozenset(row for row, best in enumerate(self._best_B.tolist()) if math.isnan(best))
        return Chosen(tokens, dict(zip(self._asked, found[count:], strict=True)), self._own_AV, strange)


def choose(rows: Tensor | Sequence[Tensor], answers: Sequence[Answer], asked: Sequence[int], ends: frozenset[int]) -> Choice:
    """A token for each row.

    Args:
        rows: logits ``[B, V]`` in fp32, or as many rows ``[V]``.
        answers: whose next token each row is of.
        asked: rows whose log-probabilities are wanted.
        ends: ids that end a text, for the model.
    """
    as_they_are = not any(map(changes, answers))
    logits_BV, own_AV = gathered(rows, asked, read_only=as_they_are)
    if not as_they_are:
        change(logits_BV, answers, ends)
    best_B, tokens_B = largest(logits_BV)
    alike: dict[tuple[float, ...], list[int]] = {}
    for row, answer in enumerate(answers):
        sampling = answer.request.sampling
        if not sampling.greedy:
            alike.setdefault((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p), []).append(row)
    for these in alike.values():
        sampling, generators = answers[these[0]].request.sampling, [answers[row].generator for row in these]
        if len(these) == len(rows):
            tokens_B = drawn(probabilities(logits_BV, sampling), _numbers(generators))
        else:
            rows_G = to_device(these, logits_BV.device)
            tokens_B[rows_G] = drawn(probabilities(logits_BV[rows_G], sampling), _numbers(generators))
    return Choice(tokens_B, best_B, asked, own_AV, any(answers[row].request.sampling.logprobs for row in asked))


def to_device(numbers: Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """For operators there, which the host does not wait for."""
    there = torch.tensor(numbers, dtype=torch.float64 if isinstance(numbers[0], float) else torch.int64, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


def probabilities(logits_GV: Tensor, sampling: Sampling) -> Tensor:
    """What tokens are drawn by: temperature, then the likeliest by number, by their sum, and beside the likeliest one."""
    # From the largest on, so that nothing but what is unlikely leaves fp32's range.
    logits_GV = (logits_GV - logits_GV.amax(-1, keepdim=True)).div_(sampling.temperature)
    if 0 < sampling.top_k < logits_GV.shape[-1]:
        logits_GV = logits_GV.masked_fill(logits_GV < logits_GV.topk(sampling.top_k).values[..., -1:], -torch.inf)
    if sampling.top_p < 1:
        ordered_GV, which_GV = logits_GV.sort(descending=True, stable=True)
        before_GV = ordered_GV.softmax(-1).cumsum(-1).roll(1, -1)
        before_GV[..., 0] = 0
        unlikely_GV = before_GV >= sampling.top_p
        unlikely_GV[..., 0] = False  # a top_p may be 0 in fp32
        logits_GV = logits_GV.scatter(-1, which_GV, ordered_GV.masked_fill(unlikely_GV, -torch.inf))
    if sampling.min_p > 0:
        p_GV = logits_GV.softmax(-1)
        logits_GV = logits_GV.masked_fill(p_GV < sampling.min_p * p_GV.amax(-1, keepdim=True), -torch.inf)
    return logits_GV.softmax(-1)


def _numbers(generators: Sequence[torch.Generator | None]) -> list[float]:
    return [float(torch.rand((), generator=each, dtype=torch.float64)) for each in generators]


def drawn(p_GV: Tensor, numbers: Sequence[float]) -> Tensor:
    """Of each row the token in whose part of the sum its number from 0 to 1 falls."""
    sums_GV = p_GV.double().cumsum(-1)
    at_G = to_device(numbers, p_GV.device) * sums_GV[:, -1]
    index_G = torch.searchsorted(sums_GV, at_G[:, None], right=True)[:, 0]
    last_G = torch.arange(p_GV.shape[-1], device=p_GV.device).where(p_GV > 0, 0).amax(-1)
    return index_G.minimum(last_G)


def changes(answer: Answer) -> bool:
    """Whether its next token is chosen of other logits than the model's."""
    sampling = answer.request.sampling
    penalties = sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    return bool(penalties or sampling.logit_bias or answer.form is not None or answer.generated < sampling.min_tokens)


def change(logits_BV: Tensor, answers: Sequence[Answer], ends: frozenset[int]) -> None:
    """In place, what requests want of logits, whatever way they choose."""
    for row, answer in enumerate(answers):
        if changes(answer):
            try:
                _change(logits_BV[row], answer, ends)
            except Exception as error:  # nobody else's row
                answer.request.fail(error)
                logits_BV[row] = -torch.inf


def _change(logits_V: Tensor, answer: Answer, ends: frozenset[int]) -> None:
    request = answer.request
    sampling, device = request.sampling, logits_V.device
    if sampling.logit_bias:
        biased = _kept(request, "biased", list(sampling.logit_bias), device)
        logits_V[biased] += _kept(request, "bias", list(sampling.logit_bias.values()), device).to(logits_V.dtype)
    if sampling.repetition_penalty != 1:
        seen = _kept(request, "prompt", list(request.prompt_ids), device)
        if new := [token for token in answer.times if token not in request.prompt_ids]:
            seen = torch.cat([seen, to_device(new, device)])
        of_seen = logits_V[seen]
        logits_V[seen] = torch.where(of_seen > 0, of_seen / sampling.repetition_penalty, of_seen * sampling.repetition_penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and answer.generated:
        seen = to_device(list(answer.times), device)
        times = to_device(list(answer.times.values()), device).to(logits_V.dtype)
        logits_V[seen] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if answer.form is not None:
        logits_V.masked_fill_(~answer.form.allowed(len(logits_V)).to(device), -torch.inf)
    if answer.generated < sampling.min_tokens and (stops := ends | request.stop_ids):
        others_V = logits_V.index_fill(0, _kept(request, "stops", list(stops), device), -torch.inf)
        if others_V.max() > -torch.inf:  # a form that is whole can only end
            logits_V.copy_(others_V)


def _kept(request: Request, name: str, numbers: Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """On the device, where a request's numbers are brought once."""
    if (found := request.kept.get(name)) is None:
        found = request.kept[name] = to_device(numbers, device)
    return found
