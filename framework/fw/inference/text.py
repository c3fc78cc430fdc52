"""The text of an answer as it comes, up to what ends it."""

from __future__ import annotations

from collections.abc import Sequence

from fw.tokenizer import TextStream, Tokenizer


class AnswerText:
    """Gives text as soon as it can neither change nor be the beginning of what ends it; so nothing of that is ever given.

    Args:
        stops: texts that end it.
        least: tokens after which they do; what began before is text.
        skip_special_tokens: leave these out.
        after: the prompt, with which it is one text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], least: int, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> None:
        self._stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens, after=after)
        self._stops, self._least = stops, least
        self._tokens = 0
        self._held = ""
        self._before = 0
        """Characters that came before any text could end it."""
        self.given = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """What a further token completes. After it :attr:`stopped_by` says whether a text has ended it."""
        self._tokens += 1
        more = self._stream.push(token)
        return self._give(more, self._stream.ahead() if self._stops else "", last=False)

    def finish(self) -> str:
        """The rest."""
        return self._give(self._stream.finish(), "", last=True)

    def _give(self, more: str, ahead: str, last: bool) -> str:
        if self.stopped_by is not None:
            return ""
        text = self._held + more
        if self._tokens > self._least or not self._least:
            found = min(((at, -len(stop), stop) for stop in self._stops if (at := self._find(stop, text + ahead)) >= 0), default=None)
            if found is not None:
                self.stopped_by, self._held = found[2], ""
                return self._given((text + ahead)[: found[0]])
        else:
            self._before = len(self.given) + len(text) + len(ahead)
        held = 0 if last else max((_begins(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return self._given(text[: len(text) - held])

    def _find(self, stop: str, text: str) -> int:
        """Where it is in what comes after what was given, if any of it came when it could end it."""
        return text.find(stop, max(0, self._before - len(self.given) - len(stop) + 1))

    def _given(self, text: str) -> str:
        self.given += text
        return text


def _begins(text: str, stop: str) -> int:
    """How many characters at the end of a text are a beginning of ``stop``, but not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
