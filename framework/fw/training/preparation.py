"""Data made ready for a run ahead of it, and what there is to know of it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fw import config as configuration
from fw.kinds.data import Corpus, VaryingSamples
from fw.meter.drawing import Drawing, Line, Words
from fw.recipe import current_world, resolve
from fw.training.inputs import open_data, say

_BAR = "#3b6ea5"


@dataclass(frozen=True)
class Prepared:
    """What a run will read.

    Attributes:
        train_samples, val_samples: rows by themselves, before they are packed.
        train_tokens, val_tokens: that are predicted, and one.
        bytes_per_token: of text, by the validation split.
        facts: :attr:`fw.kinds.data.Corpus.facts`.
        histogram: how many documents, or samples where those are all there is, have so many tokens: from, to (not itself), number.
    """

    config: str
    train_samples: int
    val_samples: int
    train_tokens: int
    val_tokens: int
    bytes_per_token: float
    vocab_size: int
    facts: Mapping[str, int] = field(default_factory=dict)
    histogram: Sequence[tuple[int, int, int]] = ()

    def as_json(self) -> dict[str, Any]:
        """Its attributes."""
        return {**vars(self), "facts": dict(self.facts), "histogram": [list(bin_) for bin_ in self.histogram]}


def prepare(config: str | Path, *overrides: str) -> Prepared:
    """Do what a run of the config would do with its data before it begins; what is done already is not done again.

    Raises:
        UserError: the config or the data is wrong, with file and line.
    """
    recipe = resolve(configuration.load(config, overrides), current_world(), starts=False)
    corpus, _, _ = open_data(recipe, say)
    return Prepared(
        recipe.config.name,
        len(corpus.train),
        len(corpus.val),
        corpus.train_tokens,
        corpus.val_tokens,
        corpus.val_bytes / max(1, corpus.val_tokens - 1),
        corpus.tokenizer.vocab_size,
        corpus.facts,
        histogram(_lengths(corpus)),
    )


def _lengths(corpus: Corpus) -> NDArray[np.int64]:
    if corpus.lengths is not None:
        return corpus.lengths()
    return corpus.train.lengths if isinstance(corpus.train, VaryingSamples) else np.zeros(0, np.int64)


def histogram(lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """In bins from one power of two to the next, from the first that has one to the last."""
    if not len(lengths):
        return []
    of = np.frexp(np.maximum(lengths, 1))[1] - 1
    counts = np.bincount(of)
    first = int(np.flatnonzero(counts)[0])
    return [(1 << power, 2 << power, int(counts[power])) for power in range(first, len(counts))]


def lines(found: Prepared) -> list[str]:
    """As ``fw data prepare`` prints it."""
    rows = [
        ("training", f"{found.train_tokens - 1:,} tokens to predict in {found.train_samples:,} samples"),
        ("validation", f"{found.val_tokens - 1:,} in {found.val_samples:,}"),
        ("vocabulary", f"{found.vocab_size:,} ids, {found.bytes_per_token:.2f} bytes of text a token"),
        *((name, f"{number:,}") for name, number in found.facts.items()),
    ]
    told = [f"{name:<12} {text}" for name, text in rows]
    if found.histogram:
        most = max(number for *_, number in found.histogram)
        told += ["", "tokens of a document"]
        told += [f"{low:>9,} to {high - 1:<9,} {'█' * round(40 * number / most):<40} {number:,}" for low, high, number in found.histogram]
    return told


def picture(found: Prepared) -> Drawing:
    """The histogram."""
    width, height, left, top, bottom = 760, 320, 70, 40, 50
    drawing = Drawing(width, height, f"Tokens of a document of {found.config}")
    drawing.shapes.append(Words(left, 22, f"Tokens of a document: {found.config}", bold=True, size=15))
    bins = list(found.histogram)
    most = max((number for *_, number in bins), default=1)
    for part in range(5):
        y = height - bottom - part / 4 * (height - top - bottom)
        drawing.shapes += [Line((left, y), (width - 20, y)), Words(left - 8, y + 4, f"{most * part // 4:,}", anchor="end", colour="soft")]
    step = (width - 20 - left) / max(1, len(bins))
    for place, (low, _, number) in enumerate(bins):
        tall = number / most * (height - top - bottom)
        drawing.rectangle(left + place * step + 3, height - bottom - tall, step - 6, tall, _BAR)
        drawing.shapes.append(Words(left + place * step, height - bottom + 18, f"{low:,}", anchor="middle", colour="soft"))
    if bins:
        drawing.shapes.append(Words(left + len(bins) * step, height - bottom + 18, f"{bins[-1][1]:,}", anchor="middle", colour="soft"))
    return drawing


def page(found: Prepared) -> str:
    """Self-contained, light and dark."""
    title = html.escape(f"Data of {found.config}")
    told = html.escape("\n".join(lines(found)).partition("\n\n")[0])
    style = (
        ":root { color-scheme: light dark; } body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 2rem auto;"
        " padding: 0 1rem; } pre { font: 14px/1.6 ui-monospace, monospace; overflow-x: auto; } svg { width: 100%; height: auto; }"
    )
    head = f"<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'><title>{title}</title>"
    body = f"<h1>{title}</h1><pre>{told}</pre>{picture(found).svg('lengths') if found.histogram else ''}"
    return f"<!doctype html><html lang='en'><head>{head}<style>{style}</style></head><body>{body}</body></html>\n"
