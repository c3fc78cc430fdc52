"""Requests in, tokens out, a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from fw.config import InferenceSection
from fw.errors import UserError
from fw.inference.adapters import Adapter, Adapters
from fw.inference.cached import Logits, Piece, Runner
from fw.inference.checking import check
from fw.inference.options import Sampling
from fw.inference.pieces import goes_on_simply, piece_of
from fw.inference.results import Delta, FinishReason, Pooling, Result
from fw.inference.sampling import Choice, choose
from fw.inference.scheduler import Scheduler
from fw.inference.sequence import Answer, Request
from fw.inference.speculation import Guesser
from fw.inference.structure import Form, Structure
from fw.inference.telling import blame, pool, result_of, tell
from fw.inference.text import AnswerText
from fw.inference.warm_up import warm_up
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


@dataclass
class _Made:
    """A step that was begun.

    Attributes:
        choice: of a token of each, where that was begun, too.
    """

    taken: Sequence[tuple[Answer, Stretch]]
    pieces: Sequence[Piece]
    logits: Sequence[Tensor]
    choice: Choice | None = None


class Engine:
    """Generates for many requests at once. One thread uses it.

    With ``overlap`` a step is begun, where that can be, before the tokens of the one before have come from the device: these are its input
    there. The host looks at them while the device computes. An answer that ends by its token has been computed one token too far, and
    what came of that is dropped.

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
        overlap: with one rank, and nobody who guesses.
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
        overlap: bool = False,
    ) -> None:
        self.runner, self._options, self._tokenizer = runner, options, tokenizer
        self.context, self.vocab_size, self.ends = context, vocab_size, ends
        self.scheduler = Scheduler(cache, options)
        self.structure = Structure(tokenizer, vocab_size, ends)
        self.reads, self.read_bytes = reads, 0
        self.guesses, self.right_guesses = 0, 0
        self.adapters, self.guesser, self._threads = adapters, guesser, threads
        self._shows_hidden_states, self.overlap = shows_hidden_states, overlap and guesser is None
        self._ahead: _Made | None = None
        self._requests: dict[str, Request] = {}
        self._texts: dict[int, AnswerText] = {}
        self._arrivals, self._numbers = count(), count()

    def __len__(self) -> int:
        """Requests that are not ended."""
        return len(self._requests)

    @property
    def begun(self) -> list[str]:
        """Requests that a step computes something of, or has; the others only wait."""
        running = {answer.request.key for answer in self.scheduler.running}
        return [key for key, of in self._requests.items() if key in running or any(a.finish_reason for a in of.answers)]

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Do now what the first requests would wait for: as steps of so many sequences do."""
        with self._threads():
            warm_up(self.runner, self.scheduler.cache, self.context, sizes)

    def add(
        self,
        key: str,
        prompt: Sequence[int],
        sampling: Sampling,
        priority: int = 0,
        adapter: str | Adapter | None = None,
        pooling: Pooling | None = None,
        form: Form | None = None,
    ) -> None:
        """A request, which runs from the next step on that has room.

        Args:
            key: that no other request has now.
            prompt: ids, one at least.
            priority: lower goes first.
            adapter: by its name, or one that was found before: it may have been dropped since.
            pooling: instead of an answer give the prompt's embedding, made of its hidden states so.
            form: that ``sampling`` asks for, by :attr:`structure`; None where it is to be made now.

        Raises:
            UserError: the prompt is too long, empty, or has ids that the model does not; more is asked for than ever fits, an adapter
                that is not loaded, or hidden states of a model that has none to show.
        """
        assert key not in self._requests, "keys are of one request each"
        if pooling is not None:
            sampling = Sampling(max_tokens=0, logprobs=None)
            if not self._shows_hidden_states:
                raise UserError("hidden states of this model are not to be had, so it gives no embeddings; those of fw's own models are")
        limit = check(prompt, sampling, self.context, self.vocab_size, self._options.max_sequences)
        chosen = self.adapters.find(adapter) if isinstance(adapter, str) else adapter
        request = Request(
            key,
            list(prompt),
            sampling,
            priority,
            next(self._arrivals),
            limit,
            adapter=chosen,
            form=form or self.structure.form(sampling),
            pooling=pooling,
        )
        first = self._answer(request, 0)
        first.copies = sampling.drawn - 1
        self._requests[key] = request
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
        made = self._begun()
        if not made.taken:
            return [], []
        if self.overlap:
            self._ahead = self._following(made)
        return self._looked_at(made)

    def _begun(self) -> _Made:
        """The step that was begun ahead, as far as somebody still wants it; else one that begins now."""
        made, self._ahead = self._ahead, None
        if made is not None:
            if any(answer.finish_reason is None for answer, _ in made.taken):
                return made
            assert made.choice is not None
            made.choice.wait()  # the device has read what it was told, which may be written anew
        taken = self.scheduler.step()
        pieces = [piece_of(answer, stretch) for answer, stretch in taken]
        return _Made(taken, pieces, self.runner.run(pieces) if taken else [])

    def _following(self, made: _Made) -> _Made | None:
        """The next step, if all that it computes is known but for the tokens themselves, which are on the device."""
        rows = [row for row, (answer, _) in enumerate(made.taken) if answer.finish_reason is None]
        here = [made.taken[row] for row in rows]
        if not all(goes_on_simply(answer, stretch) for answer, stretch in here) or not (taken := self.scheduler.after(here)):
            return None
        made.choice = made.choice or self._choice([rows_RV[-1] for rows_RV in made.logits], [answer for answer, _ in made.taken])
        tokens_B = made.choice.tokens_B
        if len(taken) < len(tokens_B):
            going = {answer for answer, _ in taken}
            tokens_B = torch.stack([tokens_B[row] for row in rows if made.taken[row][0] in going])
        pieces = [Piece(stretch, (), range(1)) for _, stretch in taken]
        logits = self.runner.run(pieces, tokens_B)
        # Before the next step is made in the same places.
        return _Made(taken, pieces, logits, self._choice([rows_RV[-1] for rows_RV in logits], [answer for answer, _ in taken]))

    def _looked_at(self, made: _Made) -> tuple[list[Delta], list[Result]]:
        here = [(row, answer, stretch) for row, (answer, stretch) in enumerate(made.taken) if answer.finish_reason is None]
        self.scheduler.computed([(answer, stretch) for _, answer, stretch in here])
        self.read_bytes += self.reads.step_bytes + int(self.reads.token_bytes * sum(stretch.end for _, stretch in made.taken))
        if made.choice is not None:
            deltas = self._chosen({row: answer for row, answer, _ in here}, made.choice)
            return deltas, self._results(deltas)
        if len(here) == len(made.taken) and (whole_BV := self._plainly(made)) is not None:
            answers = [answer for _, answer, _ in here]
            deltas = self._chosen(dict(enumerate(answers)), self._choice(whole_BV, answers))
            return deltas, self._results(deltas)
        ready: list[tuple[Answer, Tensor]] = []
        guessed: list[tuple[Answer, Tensor]] = []
        ended_at_once: list[Answer] = []
        for row, answer, stretch in here:
            rows_RV = made.logits[row]
            if answer.request.pooling is not None:
                pool(answer.request, rows_RV, begins=stretch.start == 0)
            if answer.remaining == 0 and answer.request.limit == 0:
                ended_at_once += self._all_of(answer)
            elif answer.remaining == 0:
                guesses = stretch.end - answer.computed
                ready += [(each, rows_RV[-1 - guesses]) for each in self._all_of(answer)]
                guessed += [(answer, rows_RV[-guesses:])] if guesses else []
        deltas = self._chosen_of(ready) if ready else []
        deltas += self._checked(guessed)
        for each in ended_at_once:
            deltas.append(Delta(each.request.key, each.index, self._finish(each, "length"), None, None, "length"))
        self._guess([answer for answer, _ in ready])
        return deltas, self._results(deltas)

    def _plainly(self, made: _Made) -> Tensor | None:
        """Logits ``[B, V]`` of a step that gives each answer a token, and is followed by no guess."""
        if self.guesser is not None or not isinstance(made.logits, Logits) or len(made.logits.whole_RV) != len(made.taken):
            return None
        simply = all(goes_on_simply(answer, stretch) for answer, stretch in made.taken)
        return made.logits.whole_RV if simply else None

    def _results(self, deltas: Sequence[Delta]) -> list[Result]:
        """Of requests that have ended by these."""
        ended = [self._requests[key] for key in dict.fromkeys(d.key for d in deltas if d.finish_reason)]
        for request in ended:
            for answer in request.answers if request.error is not None else ():
                if answer.finish_reason is None:  # it would be for nobody
                    self._finish(answer, "abort")
        return [self._ended(request) for request in ended if all(a.finish_reason for a in request.answers)]

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
            deltas += self._chosen_of([(answer, rows_RV[turn]) for answer, rows_RV in guessed])
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
        wanted = sampling.stop, sampling.min_tokens, sampling.skip_special_tokens
        self._texts[answer.number] = AnswerText(self._tokenizer, *wanted, after=request.prompt)
        request.answers.append(answer)
        return answer

    def _all_of(self, answer: Answer) -> list[Answer]:
        """The answer, and those that begin with it."""
        request = answer.request
        return [answer, *(self._answer(request, answer.index + 1 + n) for n in range(answer.copies))]

    def _choice(self, rows: Tensor | Sequence[Tensor], answers: Sequence[Answer]) -> Choice:
        known = [answer.request.sampling for answer in answers]
        asked = [row for row, sampling in enumerate(known) if sampling.logprobs is not None or sampling.best_of is not None]
        return choose(rows, answers, asked, self.ends)

    def _chosen_of(self, ready: Sequence[tuple[Answer, Tensor]]) -> list[Delta]:
        answers = [answer for answer, _ in ready]
        return self._chosen(dict(enumerate(answers)), self._choice([row_V for _, row_V in ready], answers))

    def _chosen(self, answers: Mapping[int, Answer], choice: Choice) -> list[Delta]:
        """Tokens of these answers, by their rows."""
        chosen = choice.told()
        first: dict[str, Answer] = {}
        for row, answer in answers.items():
            if (token := chosen.tokens[row]) is None:
                blame(answer, row in chosen.strange)
            elif row in chosen.logprobs:
                own_V = chosen.own(row) if answer.request.sampling.logprobs else None
                tell(answer.logprobs, chosen.logprobs[row], own_V, answer.request.sampling.logprobs or 0)
                answer.total += answer.logprobs.chosen[-1]
            if token is not None:
                answer.tokens.append(token)
            if (of := first.setdefault(answer.request.key, answer)) is not answer and of.copies:
                self.scheduler.begin_copy(of, answer)
        return [self._take(answer, chosen.tokens[row]) for row, answer in answers.items()]

    def _take(self, answer: Answer, token: int | None) -> Delta:
        """What a new token means for its answer, or that there is none to choose, or that something goes wrong with it alone."""
        try:
            if token is not None:
                return self._taken(answer, token)
            rest = self._finish(answer, "abort")
        except Exception as error:
            answer.request.fail(error)
            rest = ""
            self._let_go(answer, "abort")
        return Delta(answer.request.key, answer.index, rest, None, None, "abort")

    def _taken(self, answer: Answer, token: int) -> Delta:
        sampling, text = answer.request.sampling, self._texts[answer.number]
        asked = token in answer.request.stop_ids
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
        self._let_go(answer, reason)
        return rest

    def _let_go(self, answer: Answer, reason: FinishReason) -> None:
        answer.finish_reason = reason
        self.scheduler.remove(answer)
        if self.guesser is not None:
            self.guesser.forget(answer)

    def _ended(self, request: Request) -> Result:
        del self._requests[request.key]
        result = result_of(request, {answer.number: self._texts.pop(answer.number).given for answer in request.answers})
        request.answers = []  # which know the request, too: without a circle both are gone at once, and not when somebody collects garbage
        return result
