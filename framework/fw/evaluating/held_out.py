"""How well a model predicts sets of text: mean loss of a token, perplexity, bits for each byte."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from glob import glob
from pathlib import Path

from fw.bars import Bar
from fw.errors import UserError
from fw.evaluating.scoring import scores, windows
from fw.inference.llm import LLM
from fw.kinds import make
from fw.kinds.data import DataPlugin
from fw.pretrained.calibration import PYTHON_DOCS

_TOGETHER = 1 << 16
"""Tokens of documents that are read before they are scored."""


@dataclass(frozen=True)
class TextSet:
    """``files`` are paths and patterns, or ``python-docs`` for what of Python's documentation the text data keeps for validation."""

    name: str
    files: str

    @staticmethod
    def of(words: str) -> TextSet:
        """``NAME=FILES``, or ``FILES`` alone."""
        name, given, files = words.partition("=")
        return TextSet(name, files) if given else TextSet(Path(words).stem.strip("*") or words, words)

    def documents(self, tokenizer: str) -> Iterator[str]:
        """Of text files all, of ``.jsonl`` each line's ``text``.

        Args:
            tokenizer: the model's, its directory.

        Raises:
            UserError: there are none, or one cannot be read; with the line.
        """
        if self.files == PYTHON_DOCS:
            plugin = make(DataPlugin, "text", source=PYTHON_DOCS, tokenizer=tokenizer)
            plugin.prepare(lambda told: None)
            yield from plugin.open(8).val_text()
            return
        paths = sorted(path for path in map(Path, glob(self.files, recursive=True)) if path.is_file())
        if not paths:
            raise UserError(f"--text: no file is called {self.files}")
        for path in paths:
            try:
                yield from _lines(path) if path.suffix == ".jsonl" else [path.read_text(encoding="utf-8")]
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"--text: {path} cannot be read as text: {error}") from None


@dataclass(frozen=True)
class Loss:
    """Of a set.

    Attributes:
        documents: each scored by itself, behind the token that begins a text.
        tokens: that were predicted.
        loss: mean negative log-likelihood of a token, nats.
        perplexity: of a token, ``exp(loss)``.
        bits_per_byte: of the text in UTF-8, which models of other tokenizers can be compared by.
    """

    documents: int
    tokens: int
    bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float


def held_out_loss(llm: LLM, texts: TextSet) -> Loss:
    """Of all documents together.

    Raises:
        UserError: there is no text.
    """
    begins = llm.tokenizer.bos_id if llm.tokenizer.bos_id is not None else llm.tokenizer.eos_id
    documents = tokens = size = 0
    total = 0.0
    with Bar(desc=texts.name, unit=" tokens", unit_scale=True) as bar:
        for some in _by_size(texts.documents(llm.tokenizer.place), llm):
            parts = [part for text, ids in some for part in windows(ids, begins, llm.engine.context)]
            total -= sum(score.logprob for score in scores(llm, parts))
            tokens += sum(len(part.own) for part in parts)
            documents += len(some)
            size += sum(len(text.encode("utf-8", "replace")) for text, _ in some)
            bar.update(sum(len(part.own) for part in parts))
    if not tokens:
        raise UserError(f"--text: {texts.name} has no text")
    loss = total / tokens
    return Loss(documents, tokens, size, loss, math.exp(min(loss, 700.0)), total / math.log(2) / size)


def _by_size(documents: Iterator[str], llm: LLM) -> Iterator[Sequence[tuple[str, list[int]]]]:
    some: list[tuple[str, list[int]]] = []
    count = 0
    for text in documents:
        some.append((text, llm.tokenizer.encode(text, add_special_tokens=False)))
        count += len(some[-1][1])
        if count >= _TOGETHER:
            yield some
            some, count = [], 0
    if some:
        yield some


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    text = json.loads(line)["text"]
                    if not isinstance(text, str):
                        raise TypeError
                except (ValueError, KeyError, TypeError):
                    raise UserError(f"--text: {path}:{number} is no JSON object with a 'text'") from None
                yield text
