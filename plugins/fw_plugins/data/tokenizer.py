"""Tokenizers made on the spot, both in the ``tokenizers`` library's format: single bytes, or byte-level BPE trained on the text."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers, trainers

from fw.api import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def byte_tokenizer() -> Tokenizer:
    """One token per byte of UTF-8, and the end of text: 257 ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _finished(_assemble(Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with ``vocab_size`` ids, the end of text included, merges learnt from ``texts``."""
    backend = _assemble(Backend(models.BPE()))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _finished(backend)


def _assemble(backend: Backend) -> Backend:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


def _finished(backend: Backend) -> Tokenizer:
    return Tokenizer.from_backend(backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
