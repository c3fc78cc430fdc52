"""What comes of a request. Needs nothing heavy, so that whoever only waits for answers can have it, too."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
Pooling = Literal["mean", "last"]
"""How hidden states of a prompt become one: their mean, or the last token's."""


@dataclass(frozen=True)
class Delta:
    """What a step has added to an answer.

    Attributes:
        text: that is certain now; often empty.
        token: that was generated; None where the answer ended otherwise.
        logprob: of the token, under the model itself; None where nobody asked.
        top: likeliest tokens in its place, by id; empty where none were asked for.
    """

    key: str
    index: int
    text: str
    token: int | None
    logprob: float | None
    finish_reason: FinishReason | None
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Completion:
    """An answer.

    Attributes:
        text: without special tokens, and without what ended it.
        token_ids: all that were generated, the one that ended it included.
        logprobs: of these, under the model itself; empty where none were asked for.
        top_logprobs: in the place of each, the likeliest by id; empty where none were asked for.
        finish_reason: ``stop`` at the model's own end or one that was asked for, ``length`` at the most tokens, ``abort``.
        stopped_by: the text or id that ended it; None for the model's own end.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: FinishReason
    stopped_by: str | int | None = None


@dataclass(frozen=True, repr=False)
class Result:
    """What came of a request.

    Attributes:
        completions: its answers, as many as ``n``; where more were generated (``best_of``), the likeliest of these, and first of all.
        prompt_token_ids: of the prompt.
        prompt_logprobs: of its tokens from the second on, or from ``prompt_logprobs_from`` on, where they were asked for; likewise
            ``prompt_top_logprobs``.
        cached_tokens: of the prompt, that others had computed.
        embedding: of the prompt, where that was asked for; else empty.
        error: why an answer could not go on; None where all ended as they should.
        fault: what a log has of it, where that is not what was asked for.
        generated_tokens: of all answers, also of those of ``best_of`` that are not given.
    """

    key: str
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[float]
    prompt_top_logprobs: list[dict[int, float]]
    cached_tokens: int
    embedding: Sequence[float] = ()
    error: str | None = None
    fault: str | None = None
    generated_tokens: int = 0

    def __repr__(self) -> str:
        answers = [f"{each.text!r} ({len(each.token_ids):,} tokens, {each.finish_reason})" for each in self.completions]
        told = [*answers, *([f"embedding of {len(self.embedding):,}"] if self.embedding else []), *([self.error] if self.error else [])]
        return f"Result of {len(self.prompt_token_ids):,} tokens: {'; '.join(told)}"

    def _repr_html_(self) -> str:
        answers = "".join(
            f"<pre style='white-space:pre-wrap'>{html.escape(each.text)}</pre>"
            f"<small>{len(each.token_ids):,} tokens, {each.finish_reason}</small>"
            for each in self.completions
        )
        return answers or f"<pre>{html.escape(repr(self))}</pre>"

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """Of the first answer."""
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[float]:
        """Of the first answer."""
        return self.completions[0].logprobs

    @property
    def top_logprobs(self) -> list[dict[int, float]]:
        """Of the first answer."""
        return self.completions[0].top_logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first answer."""
        return self.completions[0].finish_reason
