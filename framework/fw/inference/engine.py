"""Requests in, tokens out, a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from fw.config import InferenceSection
from fw.errors import UserError
from fw.inference.adapters import Adapters
from fw.inference.cached import Piece, Runner
from fw.inference.options import Sampling
from fw.inference.results import Completion, Delta, FinishReason, Pooling, Result
from fw.inference.sampling import choose
from fw.inference.scheduler import Scheduler
from fw.inference.sequence import Answer, Logprobs, Request
from fw.inference.speculation import Guesser
from fw.inference.structure import Structure
from fw.inference.text import AnswerText
from fw.kinds.kv_cache import KVCache, Stretch
from fw.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reads:
    """What a step reads: of weights in any case, and of keys and values for each token that another one sees.

    Attributes:
        step_bytes: 0 where tokens take different weights.
    """

    step_bytes: int
    token_bytes: float


class Engine:
    """Generates for many requests at once. One thread uses it.

    Args:
        runner: of the model, over ``cache``.
        context: tokens of the longest sequence.
        vocab_size: of the model.
        ends: ids that end a text, for the model.
        reads: what a step reads, for :attr:`read_bytes`, their sum so far.
        adapters: that requests may ask for.
        guesser: of what comes next; None where nobody guesses.
        threads: is entered for each step: how many threads there are meanwhile.
        shows_hidden_states: whether the model does, so that prompts have embeddings.
    """

    def __init__(
        self,
        runner: Runner,
        cache: KVCache,
        options: InferenceSection,
        tokenizer: Tokenizer,
        context: int,
        vocab_size: int,
        ends: frozenset[int],
        reads: Reads,
        adapters: Adapters,
        guesser: Guesser | None = None,
        threads: Callable[[], AbstractContextManager[None]] = nullcontext,
        shows_hidden_states: bool = True,
    ) -> None:
        self.runner, self._options, self._tokenizer = runner, options, tokenizer
        self.context, self.vocab_size, self.ends = context, vocab_size, ends
        self.scheduler = Scheduler(cache, options)
        self._structure = Structure(tokenizer, vocab_size, ends)
        self.reads, self.read_bytes = reads, 0
        self.guesses, self.right_guesses = 0, 0
        self.adapters, self.guesser, self._threads = adapters, guesser, threads
        self._shows_hidden_states = shows_hidden_states
        self._requests: dict[str, Request] = {}
        self._texts: dict[int, AnswerText] = {}
        self._arrivals, self._numbers = count(), count()

    def __len__(self) -> int:
        """Requests that are not ended."""
        return len(self._requests)

    def add(
        self,
        key: str,
        prompt: Sequence[int],
        sampling: Sampling,
        priority: int = 0,
        adapter: str | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """A request, which runs from the next step on that has room.

        Args:
            key: that no other request has now.
            prompt: ids, one at least.
            priority: lower goes first.
            adapter: by its name.
            pooling: instead of an answer give the prompt's embedding, made of its hidden states so.

        Raises:
            UserError: the prompt is too long, empty, or has ids that the model does not; more is asked for than ever fits, an adapter
                that is not loaded, or hidden states of a model that has none to show.
        """
        assert key not in self._requests, "keys are of one request each"
        if not prompt:
            raise UserError("the prompt has no tokens; a model needs one at least, its beginning of a text for one")
        if pooling is not None:
            sampling = Sampling(max_tokens=0, logprobs=None)
            if not self._shows_hidden_states:
                raise UserError("hidden states of this model are not to be had, so it gives no embeddings; those of fw's own models are")
        if len(prompt) >= self.context + (sampling.max_tokens == 0):
            raise UserError(f"the prompt has {len(prompt)} tokens, and prompt and answer together at most {self.context}")
        for what, ids in (
            ("the prompt", prompt),
            ("logit_bias", sampling.logit_bias),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if strange := [token for token in ids if not 0 <= token < self.vocab_size]:
                raise UserError(f"{what} has token {strange[0]}, and the model has {self.vocab_size}")
        if sampling.drawn > self._options.max_sequences:
            raise UserError(f"{sampling.drawn} answers are more than run at once, inference.max_sequences: {self._options.max_sequences}")
        limit = self.context - len(prompt)
        if sampling.max_tokens is not None:
            limit = min(limit, sampling.max_tokens)
        chosen = None if adapter is None else self.adapters.find(adapter)
        request = Request(
            key,
            list(prompt),
            sampling,
            priority,
            next(self._arrivals),
            limit,
            adapter=chosen,
            form=self._structure.form(sampling),
            pooling=pooling,
        )
        self._requests[key] = request
        first = self._answer(request, 0)
        first.copies = sampling.drawn - 1
        self.scheduler.add(first)

    def abort(self, key: str) -> Result | None:
        """End a request now; what it has so far. One that is not known is None."""
        if (request := self._requests.get(key)) is None:
            return None
        for answer in request.answers:
            if answer.finish_reason is None:
                self._finish(answer, "abort")
        return self._ended(request)

    def step(self) -> tuple[list[Delta], list[Result]]:
        """Compute what there is room for; what came of it, and which requests have ended."""
        with self._threads():
            return self._step()

    def _step(self) -> tuple[list[Delta], list[Result]]:
        taken = self.scheduler.step()
        if not taken:
            return [], []
        pieces = [_piece(answer, stretch) for answer, stretch in taken]
        logits = self.runner.run(pieces)
        self.scheduler.computed(taken)
        self.read_bytes += self.reads.step_bytes + int(self.reads.token_bytes * sum(stretch.end for _, stretch in taken))
        ready: list[tuple[Answer, Tensor]] = []
        guessed: list[tuple[Answer, Tensor]] = []
        ended_at_once: list[Answer] = []
        for (answer, stretch), piece, rows_RV in zip(taken, pieces, logits, strict=True):
            if answer.request.pooling is not None:
                _pool(answer.request, rows_RV, begins=stretch.start == 0)
            elif answer.request.wants_prompt:
                _tell_prompt(answer.request, stretch.start + piece.wanted.start, rows_RV)
            if answer.remaining == 0 and answer.request.limit == 0:
                ended_at_once += self._all_of(answer)
            elif answer.remaining == 0:
                guesses = stretch.end - answer.computed
                ready += [(each, rows_RV[-1 - guesses]) for each in self._all_of(answer)]
                guessed += [(answer, rows_RV[-guesses:])] if guesses else []
        deltas = self._chosen(ready) if ready else []
        deltas += self._checked(guessed)
        for each in ended_at_once:
            deltas.append(Delta(each.request.key, each.index, self._finish(each, "length"), None, None, "length"))
        self._guess([answer for answer, _ in ready])
        ended = [self._requests[key] for key in dict.fromkeys(d.key for d in deltas if d.finish_reason)]
        results = [self._ended(request) for request in ended if all(a.finish_reason for a in request.answers)]
        return deltas, results

    def _checked(self, guessed: Sequence[tuple[Answer, Tensor]]) -> list[Delta]:
        """Tokens after those that were guessed, as far as guesses are what was chosen."""
        deltas: list[Delta] = []
        self.guesses += sum(len(rows_RV) for _, rows_RV in guessed)
        turn = 0
        while guessed := [
            (answer, rows_RV)
            for answer, rows_RV in guessed
            if answer.finish_reason is None and turn < len(rows_RV) and answer.tokens[-1] == answer.guessed[turn]
        ]:
            self.right_guesses += len(guessed)
            for answer, _ in guessed:
                answer.computed += 1
            deltas += self._chosen([(answer, rows_RV[turn]) for answer, rows_RV in guessed])
            turn += 1
        return deltas

    def _guess(self, answers: Sequence[Answer]) -> None:
        """For the next step."""
        if self.guesser is None:
            return
        going = [answer for answer in answers if answer.finish_reason is None]
        most = [min(self._options.speculate, answer.request.limit - answer.generated - 1) for answer in going]
        for answer, guessed in zip(going, self.guesser.guess(going, most), strict=True):
            answer.guessed = guessed

    def _answer(self, request: Request, index: int) -> Answer:
        sampling = request.sampling
        generator = None
        if not sampling.greedy:
            generator = torch.Generator()
            if sampling.seed is None:
                generator.seed()
            else:
                generator.manual_seed(hash((sampling.seed, index)) % (1 << 63))
        answer = Answer(request, next(self._numbers), index, list(request.prompt), generator)
        answer.form = None if request.form is None else request.form.copy()
        self._texts[answer.number] = AnswerText(self._tokenizer, sampling.stop, sampling.min_tokens, sampling.skip_special_tokens)
        request.answers.append(answer)
        return answer

    def _all_of(self, answer: Answer) -> list[Answer]:
        """The answer, and those that begin with it."""
        request = answer.request
        return [answer, *(self._answer(request, answer.index + 1 + n) for n in range(answer.copies))]

    def _chosen(self, ready: Sequence[tuple[Answer, Tensor]]) -> list[Delta]:
        answers = [answer for answer, _ in ready]
        known = [answer.request.sampling for answer in answers]
        asked = [row for row, sampling in enumerate(known) if sampling.logprobs is not None or sampling.best_of is not None]
        chosen = choose([row_V for _, row_V in ready], answers, asked, self.ends)
        tokens = chosen.tokens
        own_AV = {} if chosen.own_AV is None else dict(zip(asked, chosen.own_AV, strict=True))
        first: dict[str, Answer] = {}
        for row, (answer, token) in enumerate(zip(answers, tokens, strict=True)):
            if row in own_AV:
                _tell(answer.logprobs, own_AV[row], chosen.logprobs[row], known[row].logprobs or 0)
                answer.total += answer.logprobs.chosen[-1]
            answer.tokens.append(token)
            if (of := first.setdefault(answer.request.key, answer)) is not answer and of.copies:
                self.scheduler.begin_copy(of, answer)
        return [self._take(answer, token) for answer, token in zip(answers, tokens, strict=True)]

    def _take(self, answer: Answer, token: int) -> Delta:
        """What a new token means for its answer."""
        sampling, text = answer.request.sampling, self._texts[answer.number]
        asked = token in sampling.stop_token_ids
        ends = answer.generated >= sampling.min_tokens and (asked or (token in self.ends and not sampling.ignore_eos))
        if answer.form is not None:
            ends = ends or token in self.ends
            if not ends:
                try:
                    answer.form.take(token)
                except UserError as error:  # nobody else's answer ends with it
                    answer.request.error = str(error)
        more = "" if ends else text.push(token)
        reason: FinishReason | None = None
        if ends:
            reason, answer.stopped_by = "stop", token if asked else None
        elif answer.request.error is not None:
            reason = "abort"
        elif text.stopped_by is not None:
            reason, answer.stopped_by = "stop", text.stopped_by
        elif answer.form is not None and answer.form.ended:
            reason = "stop"
        elif answer.generated >= answer.request.limit:
            reason = "length"
        if reason is not None:
            more += self._finish(answer, reason)
        logprob = answer.logprobs.chosen[-1] if sampling.logprobs is not None else None
        top = answer.logprobs.top[-1] if sampling.logprobs else {}
        return Delta(answer.request.key, answer.index, more, token, logprob, answer.finish_reason, top)

    def _finish(self, answer: Answer, reason: FinishReason) -> str:
        """The rest of its text, which may hold what ends it yet."""
        text = self._texts[answer.number]
        rest = text.finish()
        if text.stopped_by is not None and reason == "length":
            reason, answer.stopped_by = "stop", text.stopped_by
        answer.finish_reason = reason
        self.scheduler.remove(answer)
        if self.guesser is not None:
            self.guesser.forget(answer)
        return rest

    def _ended(self, request: Request) -> Result:
        del self._requests[request.key]
        sampling = request.sampling
        answers = request.answers
        if sampling.drawn > sampling.n:
            answers = sorted(answers, key=lambda each: -each.total / max(1, each.generated))[: sampling.n]
        completions = []
        for index, answer in enumerate(answers):
            assert answer.finish_reason is not None
            asked = answer.logprobs if sampling.logprobs is not None else Logprobs()
            text = self._texts[answer.number].given
            completions.append(Completion(index, text, answer.own, asked.chosen, asked.top, answer.finish_reason, answer.stopped_by))
        for answer in request.answers:
            del self._texts[answer.number]
        request.answers = []  # which know the request, too: without a circle both are gone at once, and not when somebody collects garbage
        prompt = request.prompt_logprobs
        return Result(
            request.key, request.prompt, completions, prompt.chosen, prompt.top, request.cached, _embedding(request), request.error
        )


def _piece(answer: Answer, stretch: Stretch) -> Piece:
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


def _pool(request: Request, rows_RD: Tensor, begins: bool) -> None:
    """Hidden states of a stretch's tokens, as many as are wanted."""
    if not rows_RD.numel():
        return
    if begins or request.hidden_D is None or request.pooling == "last":
        request.hidden_D = rows_RD.sum(0)
    else:
        request.hidden_D += rows_RD.sum(0)


def _embedding(request: Request) -> list[float]:
    if request.hidden_D is None:
        return []
    mean_D = request.hidden_D / (len(request.prompt) if request.pooling == "mean" else 1)
    return mean_D.tolist()


def _tell_prompt(request: Request, begin: int, rows_RV: Tensor) -> None:
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


def _tell(told: Logprobs, logprobs_V: Tensor, chosen: float, top: int) -> None:
    told.chosen.append(chosen)
    if top:
        values, ids = logprobs_V.topk(min(top, len(logprobs_V)))
        told.top.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
