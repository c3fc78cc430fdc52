"""A tokenizer whose tokens are characters, for models that have learnt nothing."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

from fw.tokenizer import Tokenizer

BEGIN, END = "<s>", "</s>"
FIRST = 3
"""Of the ids that are characters; before it are the unknown, the beginning and the end."""


def characters(vocabulary: int, chat_template: str | None = None) -> Tokenizer:
    """Ids 0 … vocabulary - 1; a letter is :data:`FIRST` and its place in the alphabet."""
    plain = [*"abcdefghijklmnopqrstuvwxyz .,!?"]
    letters = [*plain, *(chr(0x4E00 + n) for n in range(vocabulary - FIRST - len(plain)))]
    vocab = {token: index for index, token in enumerate(["<unk>", BEGIN, END, *letters])}
    backend = Backend(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([BEGIN, END])
    return Tokenizer.from_backend(backend, bos_token=BEGIN, eos_token=END, chat_template=chat_template)


def save(directory: Path, vocabulary: int, chat_template: str | None = None) -> None:
    """Its files, beside a model's."""
    characters(vocabulary, chat_template).save(directory)
