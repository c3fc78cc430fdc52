"""A request, and the answers that are being generated for it."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fw.errors import describe
from fw.inference.adapters import Adapter
from fw.inference.options import Sampling
from fw.inference.results import FinishReason, Pooling
from fw.inference.structure import Form


@dataclass
class Logprobs:
    """Log-probabilities of tokens one after another.

    Attributes:
        chosen: of the tokens that there are.
        top: in the place of each, the likeliest by id, where they were asked for.
    """

    chosen: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """What somebody asked for.

    Attributes:
        key: by which who asked knows it.
        priority: lower goes first; of equals, who came first.
        arrival: a number that grows.
        limit: tokens that each answer may have.
        cached: tokens of the prompt that were not computed, since others had them.
        adapter: that its tokens are computed with.
        form: that its answers begin with.
        pooling: of the prompt's hidden states, where these are what is asked for.
        hidden_D: their sum so far, or the last one, in fp32.
        begun: whether a step has computed any of it.
        error: why an answer of it could not go on.
        fault: the same for a log, where that is nobody's wish.
        kept: what is the same in each of its steps, on the device.
    """

    key: str
    prompt: list[int]
    sampling: Sampling
    priority: int
    arrival: int
    limit: int
    answers: list[Answer] = field(default_factory=list)
    prompt_logprobs: Logprobs = field(default_factory=Logprobs)
    cached: int = 0
    adapter: Adapter | None = None
    form: Form | None = None
    pooling: Pooling | None = None
    hidden_D: torch.Tensor | None = None
    begun: bool = False
    error: str | None = None
    fault: str | None = None
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        """Something went wrong with it that is nobody's wish."""
        # What it says may be of somebody's text, which no log has.
        self.error, self.fault = describe(error), "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__

    @cached_property
    def prompt_ids(self) -> frozenset[int]:
        """Of the prompt, each once."""
        return frozenset(self.prompt)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """That end an answer of it, besides the model's own."""
        return frozenset(self.sampling.stop_token_ids)

    @property
    def salt(self) -> bytes:
        """What its keys and values depend on besides its tokens."""
        return b"" if self.adapter is None else self.adapter.salt

    @property
    def wants_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are asked for, and not there yet; the first token has none."""
        return self.sampling.prompt_logprobs is not None and self.prompt_told < len(self.prompt)

    @property
    def prompt_told(self) -> int:
        """The first token of the prompt whose log-probability is to come next."""
        return self.sampling.prompt_logprobs_from + len(self.prompt_logprobs.chosen)

    @property
    def reusable(self) -> int | None:
        """Of how many of the first tokens all but the last may be known and not computed again; None for all there are."""
        if self.pooling == "mean":
            return 0
        return self.sampling.prompt_logprobs_from if self.wants_prompt else None

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first."""
        return self.priority, self.arrival


@dataclass(eq=False)
class Answer:
    """One of a request's answers: a sequence of tokens, of which some are in the cache.

    Attributes:
        number: by which the cache knows it.
        index: among the answers of the request.
        tokens: the prompt's, then its own.
        computed: of these, how many are in the cache.
        copies: answers that begin where this one does, and come to be with its first token.
        total: sum of the log-probabilities of its own tokens.
        form: that it is to have, and where it is in it.
        guessed: tokens that may come next, for the next step to check.
    """

    request: Request
    number: int
    index: int
    tokens: list[int]
    generator: torch.Generator | None = None
    computed: int = 0
    copies: int = 0
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    logprobs: Logprobs = field(default_factory=Logprobs)
    total: float = 0.0
    form: Form | None = None
    guessed: list[int] = field(default_factory=list)
    _times: dict[int, int] = field(default_factory=dict)
    _counted: int = 0

    @property
    def times(self) -> dict[int, int]:
        """How often the answer has each of its own tokens."""
        for token in self.tokens[len(self.request.prompt) + self._counted :]:
            self._times[token] = self._times.get(token, 0) + 1
        self._counted = self.generated
        return self._times

    @property
    def own(self) -> list[int]:
        """The tokens that were generated."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def generated(self) -> int:
        """How many these are."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be chosen."""
        return len(self.tokens) - self.computed

    @property
    def order(self) -> tuple[int, int, int]:
        """Who goes first."""
        return *self.request.order, self.index
