"""Tokenizers made on the spot, both in the ``tokenizers`` library's format: single bytes, or byte-level BPE trained on the text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, and the end of text: 257 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _assemble(Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with ``vocab_size`` ids, the end of text included, merges learnt from ``texts``."""
    tokenizer = _assemble(Tokenizer(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _assemble(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


class JsonTokenizer:
    """A ``tokenizer.json``. The end-of-text marker is never produced by :meth:`encode`, also where a text contains its spelling."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True
        eos_id = tokenizer.token_to_id(END_OF_TEXT)
        assert eos_id is not None, "made without an end of text"
        self._eos_id = eos_id

    @property
    def eos_id(self) -> int:
        """The id of the end of text."""
        return self._eos_id

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of many texts, on all cores."""
        return [e.ids for e in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def save(self, directory: Path) -> None:
        """Write what transformers' ``AutoTokenizer`` reads."""
        self._tokenizer.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
