"""Plain text: files, globs, or the documentation that comes with every Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from fw.api import Corpus, DataPlugin, Say, Tokenizer, UserError, did_you_mean, load_tokenizer
from fw_plugins.data import sources
from fw_plugins.data.blocks import TokenBlocks, TokenDocuments
from fw_plugins.data.cache import META, cached
from fw_plugins.data.ids_file import is_whole, lengths_of, pieces, sizes_of, write_ids
from fw_plugins.data.tokenizer import byte_tokenizer, train_bpe

_FORMAT = 2
_TOKENIZER_DONE = "tokenizer.done"
_MADE_HERE = ("bpe", "byte")


@dataclass
class TextConfig:
    """Text, how it becomes tokens, and what is held out."""

    files: list[str] = field(default_factory=list)
    """Text files or globs (`**` goes into folders), UTF-8, relative to the current directory. A file is a document; long ones are cut."""
    source: Literal["files", "python-docs"] = "files"
    """`python-docs`: about 2 MB of English that every Python carries, the language reference and the library's docstrings."""
    tokenizer: str = "bpe"
    """`bpe`: byte-level BPE trained on the training split. `byte`: a token per byte, sequences about four times as long. Otherwise a
    directory with a `tokenizer.json`, a run, or `org/name` of the hub: a fine-tuned model's own, `${model.path}`."""
    vocab_size: int = 4096
    """Ids of a bpe tokenizer. Embedding and logits grow in proportion."""
    samples: Literal["stream", "documents"] = "stream"
    """`stream`: documents one after another, cut into samples of train.sequence_length. `documents`: each is a sample of its own, those
    that are longer several; their lengths vary (train.packing, train.max_tokens_per_batch, train.length_bucketing)."""
    isolate_documents: bool = False
    """Attention does not cross documents that share a sequence; positions restart with each."""
    val_fraction: float = 0.05
    """Share of the text held out for validation, by whole documents."""
    cache_dir: str = ""
    """Where tokenizer and ids are kept, to be memory-mapped; empty for $FW_CACHE, else fw under the user's cache directory."""

    def __post_init__(self) -> None:
        if self.source == "files" and not self.files:
            raise UserError("data.files: no files given; name some, or set data.source=python-docs")
        if self.source != "files" and self.files:
            raise UserError(f"data.files: given together with data.source={self.source}; leave out one of them")
        of_the_hub = self.tokenizer.count("/") == 1 and not self.tokenizer.startswith((".", "/", "~"))
        if self.tokenizer not in _MADE_HERE and not of_the_hub and not Path(self.tokenizer).expanduser().is_dir():
            raise UserError(
                f"data.tokenizer: '{self.tokenizer}' is neither bpe nor byte nor a directory with a tokenizer.json, nor org/name of the hub"
                + (did_you_mean(self.tokenizer, _MADE_HERE) or "; give one of these")
            )
        if self.tokenizer == "bpe" and self.vocab_size < 257:
            raise UserError(f"data.vocab_size: {self.vocab_size} is too small; 256 bytes and the end of text take 257")
        if self.samples == "documents" and self.isolate_documents:
            raise UserError("data.isolate_documents: with data.samples=documents no document shares a sample; leave it out")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction: {self.val_fraction} is not between 0 and 1")


class TextData(DataPlugin):
    """Text files, globs or Python's own documentation; byte or BPE tokens, memory-mapped, split by document without leakage."""

    api = 1
    Config = TextConfig
    config: TextConfig

    def __init__(self, config: TextConfig) -> None:
        super().__init__(config)
        self._directory: Path | None = None
        self._given: Tokenizer | None = None

    def prepare(self, say: Say) -> None:
        """Split, train the tokenizer, tokenize; once per text and settings."""
        if self.config.tokenizer not in _MADE_HERE:
            try:
                self._given = load_tokenizer(self.config.tokenizer)
            except UserError as error:
                raise UserError(f"data.tokenizer: {error}") from None
            if self._given.eos_id is None:
                raise UserError(
                    f"data.tokenizer: {self.config.tokenizer} has no end-of-text token, which stands between documents;"
                    " name one as eos_token in its tokenizer_config.json"
                )
        self._directory = cached(self.config.cache_dir, f"text-{self._key()}", lambda made: self._build(made, say), resumes=True)

    def open(self, sequence_length: int) -> Corpus:
        """Map what :meth:`prepare` left on disk."""
        assert self._directory is not None, "prepare() comes first"
        directory = self._directory
        meta = json.loads((directory / META).read_text())
        # One that was given is not read from the cache: its class depends on the model's config.json beside it.
        tokenizer = self._given or load_tokenizer(directory)
        eos_id = _eos_id(tokenizer)
        by_document = self.config.samples == "documents"
        train, val = (self._samples(directory, name, meta["dtype"], sequence_length, eos_id) for name in ("train", "val"))
        if not len(train):
            raise UserError(
                f"data: {train.tokens} tokens of training text fill no sequence of {sequence_length};"
                f" give more text or set train.sequence_length to {max(1, train.tokens - 1)} or less"
            )
        return Corpus(
            train=train,
            val=val,
            tokenizer=tokenizer,
            fingerprint=meta["fingerprint"] + "-isolated" * self.config.isolate_documents + "-documents" * by_document,
            train_tokens=train.tokens,
            val_tokens=val.tokens,
            val_bytes=meta["val_bytes"],
            train_text=lambda: [tokenizer.decode(ids, skip_special_tokens=True) for ids in train.documents(eos_id)],
            val_text=lambda: [tokenizer.decode(ids, skip_special_tokens=True) for ids in val.documents(eos_id)],
            lengths=lambda: lengths_of(directory / "train.bin"),
            facts={key: meta[key] for key in ("documents", "duplicates") if key in meta},
        )

    def _samples(self, directory: Path, name: str, dtype: str, length: int, eos_id: int) -> TokenBlocks | TokenDocuments:
        file = directory / f"{name}.bin"
        if self.config.samples == "documents":
            return TokenDocuments(file, dtype, sizes_of(file), length)
        separator = eos_id if self.config.isolate_documents else None
        return TokenBlocks(file, dtype, length, keep_tail=name == "val", separator=separator)

    def _documents(self) -> Iterator[str]:
        if self.config.source == sources.PYTHON_DOCS:
            return sources.from_python()
        return sources.from_files(sources.find_files(self.config.files))

    def _key(self) -> str:
        """What the cache depends on: settings, and the files' sizes and times or Python's version."""
        if self.config.source == sources.PYTHON_DOCS:
            content: object = sources.python_version()
        else:
            stats = [(str(f.resolve()), f.stat()) for f in sources.find_files(self.config.files)]
            content = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        settings = {**asdict(self.config), "cache_dir": "", "format": _FORMAT, "content": content}
        del settings["isolate_documents"], settings["samples"]  # the ids are the same
        if self._given is not None:
            settings["tokenizer"] = self._given.fingerprint
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def _build(self, directory: Path, say: Say) -> None:
        kept, held_out, duplicates, val_bytes = _split(self._documents(), self.config.val_fraction)
        say(f"data: {kept + len(held_out)} documents, {duplicates} exact duplicates removed, {len(held_out)} held out for validation")

        def split(validation: bool) -> Iterator[str]:
            seen: set[bytes] = set()
            for text in self._documents():
                digest = _digest(text)
                if digest not in seen and (digest in held_out) == validation:
                    yield text
                seen.add(digest)

        tokenizer = self._tokenizer(directory, lambda: split(validation=False), say)
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        content = hashlib.sha256((directory / "tokenizer.json").read_bytes())
        counts = {}
        for name, total in (("train", kept), ("val", len(held_out))):
            file = directory / f"{name}.bin"
            if not is_whole(file):
                write_ids(file, split(name == "val"), tokenizer, _eos_id(tokenizer), dtype, f"tokenizing {name}", total)
            counts[name] = file.stat().st_size // np.dtype(dtype).itemsize
            for piece in pieces(file):
                content.update(piece)
        say(f"data: {counts['train']:,} training tokens and {counts['val']:,} for validation")
        facts = {"documents": kept + len(held_out), "duplicates": duplicates}
        meta = {"dtype": dtype, "val_bytes": val_bytes, "fingerprint": content.hexdigest(), **counts, **facts}
        (directory / META).write_text(json.dumps(meta))

    def _tokenizer(self, directory: Path, texts: Callable[[], Iterator[str]], say: Say) -> Tokenizer:
        """That which was given, or made; one that an interrupted pass has left is taken."""
        if self._given is not None:
            tokenizer = self._given
        elif self.config.tokenizer == "byte":
            tokenizer = byte_tokenizer()
        elif (directory / _TOKENIZER_DONE).exists():
            return load_tokenizer(directory)
        else:
            say(f"data: training a BPE tokenizer of {self.config.vocab_size} ids on the training split")
            tokenizer = train_bpe(texts(), self.config.vocab_size)
        tokenizer.save(directory)
        (directory / _TOKENIZER_DONE).touch()
        return tokenizer


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _split(documents: Iterator[str], fraction: float) -> tuple[int, set[bytes], int, int]:
    """Choose whole documents for validation, in the order of their hashes, until their share of the bytes is reached.

    Returns:
        documents to train on, digests of those held out, duplicates dropped, and bytes held out.
    """
    sizes: dict[bytes, int] = {}
    duplicates = 0
    for text in documents:
        digest = _digest(text)
        duplicates += digest in sizes
        sizes[digest] = len(text.encode())
    if len(sizes) < 2:
        raise UserError(f"data: {len(sizes)} documents, too few to hold one out for validation; give more text")
    wanted = fraction * sum(sizes.values())
    # A large document first in the order of hashes must not take several times the share.
    largest = max(wanted / 4, min(sizes.values()))
    held_out: set[bytes] = set()
    held_bytes = 0
    for digest in sorted(sizes):
        if held_bytes >= wanted or len(held_out) == len(sizes) - 1:
            break
        if sizes[digest] <= largest:
            held_out.add(digest)
            held_bytes += sizes[digest]
    return len(sizes) - len(held_out), held_out, duplicates, held_bytes


def _eos_id(tokenizer: Tokenizer) -> int:
    eos_id = tokenizer.eos_id
    assert eos_id is not None, "prepare() refuses one without"
    return eos_id
