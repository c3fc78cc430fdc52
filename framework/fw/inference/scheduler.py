"""Which tokens a step computes: prompts in pieces beside answers a token at a time, as many as there is room for.

There is no difference between prompt and answer here: a sequence has tokens that are not in the cache yet, and a step takes some of them
(Agrawal et al. 2023, https://arxiv.org/abs/2308.16369). One that finds no room takes it from who came last, whose tokens are computed anew
later (Kwon et al. 2023, https://arxiv.org/abs/2309.06180, section 4.5).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from fw.config import InferenceSection
from fw.inference.sequence import Answer
from fw.kinds.kv_cache import KVCache, Stretch

_PARTS = 8
"""Of a step; one is what a prompt may have at least."""


class Scheduler:
    """Answers that wait and answers that run, both in the order in which they go.

    Args:
        cache: must hold the longest sequence alone.
    """

    def __init__(self, cache: KVCache, options: InferenceSection) -> None:
        self.cache, self._options = cache, options
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []
        self.preemptions = 0
        self.prompt_tokens, self.cached_tokens = 0, 0
        """Of prompts that have begun, and how many of these were known."""

    @property
    def most(self) -> int:
        """Answers that run at once."""
        return self._options.max_sequences

    def add(self, answer: Answer) -> None:
        """It waits from now on."""
        bisect.insort(self.waiting, answer, key=lambda each: each.order)

    def begin_copy(self, of: Answer, copy: Answer) -> None:
        """It goes on from where another one is, whose tokens but for the last are in the cache."""
        of.copies -= 1
        if self.cache.fork(of.number, copy.number, of.computed):
            copy.computed = of.computed
            bisect.insort(self.running, copy, key=lambda each: each.order)
        else:
            self.add(copy)

    def remove(self, answer: Answer) -> None:
        """It needs nothing more."""
        if answer in self.running:
            self.running.remove(answer)
        else:  # of which there may be very many
            at = bisect.bisect_left(self.waiting, answer.order, key=lambda each: each.order)
            if self.waiting[at : at + 1] == [answer]:
                del self.waiting[at]
        self.cache.release(answer.number)

    def step(self) -> list[tuple[Answer, Stretch]]:
        """What the next step computes, with room for it; nothing only where nobody is there."""
        self._let_in_first()
        left = self._options.step_tokens
        taken: list[tuple[Answer, Stretch]] = []
        comes = self._least(self.waiting[0]) if self.waiting and self._has_place(self.waiting[0]) else 0
        least = [self._least(answer) for answer in self.running]
        others = comes + sum(least)
        preempted = False
        while len(taken) < len(self.running) and left:
            answer = self.running[len(taken)]
            behind = len(self.running) - len(taken) - 1
            others -= least[len(taken)]
            share = max(least[len(taken)], min(self._options.prompt_share, left - others))
            length = min(answer.remaining, max(1, min(share, left - behind)))
            guessed = min(len(answer.guessed), left - others - length) if length == answer.remaining else 0
            if guessed > 0 and self.cache.reserve(answer.number, answer.computed, answer.computed + length + guessed):
                length += guessed
            while answer in self.running and not self.cache.reserve(answer.number, answer.computed, answer.computed + length):
                others -= least.pop()
                self._preempt(self.running[-1])
                preempted = True
            if answer in self.running:
                taken.append((answer, Stretch(answer.number, answer.computed, length)))
                left -= length
        while not preempted and self.waiting and left and self._has_place(self.waiting[0]):
            answer = self.waiting[0]
            if (stretch := self._admitted(answer, left)) is None:
                break
            self.waiting.pop(0)
            bisect.insort(self.running, answer, key=lambda each: each.order)
            taken.append((answer, stretch))
            left -= stretch.length
        return self._with_more(taken, left) if left else taken

    def _least(self, answer: Answer) -> int:
        """Of a step's tokens, what those that go before leave it: prompts of many steps let short ones through beside them."""
        return min(answer.remaining, self._options.prompt_share, max(1, self._options.step_tokens // _PARTS))

    def _with_more(self, taken: list[tuple[Answer, Stretch]], left: int) -> list[tuple[Answer, Stretch]]:
        """Prompts take what was left for others who did not come."""
        found: list[tuple[Answer, Stretch]] = []
        for answer, stretch in taken:
            more = min(self._options.prompt_share, answer.remaining) - stretch.length
            if (more := min(more, left)) > 0 and self.cache.reserve(answer.number, answer.computed, stretch.end + more):
                stretch = Stretch(answer.number, answer.computed, stretch.length + more)
                left -= more
            found.append((answer, stretch))
        return found

    def after(self, taken: Sequence[tuple[Answer, Stretch]]) -> list[tuple[Answer, Stretch]]:
        """What the next step computes if each of these gets one token and nobody ends by it, with room for it; nothing where the next
        step may have to be another one: somebody comes in, or has to make room.

        Args:
            taken: of a step whose tokens are not known yet; none wants more than one, or begins copies of itself.
        """
        if len(taken) < len(self.running) or (self.waiting and self._may_come_in(self.waiting[0])):
            return []
        going = [(answer, stretch) for answer, stretch in taken if answer.generated + 1 < answer.request.limit]
        if len(going) > self._options.step_tokens or not all(self.cache.reserve(a.number, s.end, s.end + 1) for a, s in going):
            return []
        return [(answer, Stretch(answer.number, stretch.end, 1)) for answer, stretch in going]

    def _may_come_in(self, answer: Answer) -> bool:
        return self._has_place(answer) or self._goes_first(answer)

    def _let_in_first(self) -> None:
        """Whoever goes before some that run takes their places, and in its turn of the step their room."""
        while self.waiting and self.running and self._goes_first(self.waiting[0]):
            answer = self.waiting.pop(0)
            while not self._has_place(answer):
                self._preempt(self.running[-1])
            self._begin(answer)
            bisect.insort(self.running, answer, key=lambda each: each.order)

    def _goes_first(self, answer: Answer) -> bool:
        """Whether it goes before some that run, and these have places enough: who would get none by it takes none away."""
        stay = [each for each in self.running if each.request.priority <= answer.request.priority]
        return len(stay) < len(self.running) and self._fits([*stay, answer])

    def _has_place(self, answer: Answer) -> bool:
        return self._fits([*self.running, answer])

    def _fits(self, answers: Sequence[Answer]) -> bool:
        return sum(1 + each.copies for each in answers) <= self.most

    def _begin(self, answer: Answer) -> None:
        """With what the cache knows of it."""
        request = answer.request
        if first := answer.tokens[: request.reusable]:
            answer.computed = self.cache.reuse(answer.number, first, request.salt)
            if not request.begun:
                request.cached = answer.computed

    def _admitted(self, answer: Answer, left: int) -> Stretch | None:
        self._begin(answer)
        length = min(answer.remaining, self._options.prompt_share, left)
        if self.cache.reserve(answer.number, answer.computed, answer.computed + length):
            return Stretch(answer.number, answer.computed, length)
        self.cache.release(answer.number)
        answer.computed = 0
        return None

    def _preempt(self, answer: Answer) -> None:
        self.running.remove(answer)
        self.cache.release(answer.number)
        answer.computed = 0
        self.add(answer)
        self.preemptions += 1

    def computed(self, taken: Sequence[tuple[Answer, Stretch]]) -> None:
        """A step has been made; whether its guesses are right is not known yet."""
        for answer, stretch in taken:
            if not answer.request.begun:
                answer.request.begun = True
                self.prompt_tokens += len(answer.request.prompt)
                self.cached_tokens += answer.request.cached
            answer.computed = min(stretch.end, len(answer.tokens))
            self.cache.written(answer.number, answer.tokens, answer.computed, answer.request.salt)
