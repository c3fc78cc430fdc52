"""Whether two tokenizers are one: the data's and the one of the weights; the run's and what transformers makes of its files."""

from __future__ import annotations

from pathlib import Path

from fw.errors import UserError
from fw.kinds.data import Tokenizer
from fw.tokenizer import load_tokenizer
from fw.tokenizer.files import read_hint

_PROBE = " Hello, wo\u0308rld: 1234567  x\n\n\tdef f(): return '—' don't 你好 👋🏽 E=mc²"
"""Digits, contractions, spaces, marks, scripts: where pipelines differ."""


def foreign(weights: Path | None, tokenizer: Tokenizer) -> str:
    """A sentence, if training begins from weights that learnt with other ids than the data has; else nothing."""
    if weights is None or (ids := _ids(weights)) is None or ids == tokenizer.encode(_PROBE, add_special_tokens=False):
        return ""
    return f"the data's tokenizer is not the one in {weights}, so its weights will not know these ids; data.tokenizer={weights} uses it"


def misread(directory: Path, tokenizer: Tokenizer) -> str:
    """A sentence, if transformers will give other ids than the run's tokenizer for the files just written; else nothing."""
    try:
        theirs = load_tokenizer(directory).as_transformers_reads_it(read_hint(directory))
    except UserError:
        return ""  # no files that could be compared
    if theirs.encode(_PROBE, add_special_tokens=False) == tokenizer.encode(_PROBE, add_special_tokens=False):
        return ""
    return (
        "transformers' AutoTokenizer rebuilds the tokenizer of this architecture from its vocabulary and will give other ids than this"
        f" run (and fw) uses; load {directory}/tokenizer.json with PreTrainedTokenizerFast, or train with a tokenizer of the architecture"
    )


def _ids(directory: Path) -> list[int] | None:
    try:
        return load_tokenizer(directory).encode(_PROBE, add_special_tokens=False)
    except UserError:
        return None  # there is none, or none that could be compared
