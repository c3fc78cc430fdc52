"""Records of JSONL or Parquet files: texts, prompts with their completions, conversations."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from fw.api import CUT_OFF, Bar, Corpus, DataPlugin, Say, Tokenizer, UserError, load_tokenizer, on_day
from fw_plugins.data import conversation, sources
from fw_plugins.data.cache import META, Hopeless, cached
from fw_plugins.data.conversation import Encoded, Learnt
from fw_plugins.data.datasets_source import DatasetRecords
from fw_plugins.data.encoding import Journal, Outcome, code_of, outcomes
from fw_plugins.data.masked import MaskedRecords, MaskedWriter, PairedRecords, sizes_in
from fw_plugins.data.records import TOO_DEEP, FileRecords, Source

_FORMAT = 3
_SPLITS = ("train", "val")
_JOURNAL = ".journal"
_OF_A_DATASET = {"subset": "", "split": "train", "val_split": "", "revision": "", "streaming": False}


@dataclass
class RecordsConfig:
    """Which records, how they become tokens, and what is held out."""

    files: list[str] = field(default_factory=list)
    """Files or globs, relative to the current directory: `.jsonl` (a JSON object a line), `.jsonl.gz`, `.parquet`."""
    val_files: list[str] = field(default_factory=list)
    """The same, held out for validation; empty for a part of `files`."""
    dataset: str = ""
    """Instead of files, a dataset of Hugging Face's library `datasets`: `org/name` of the hub, a directory with files of it, or one that
    `save_to_disk` wrote."""
    subset: str = ""
    """The dataset's configuration; empty for its default."""
    split: str = "train"
    """Which of the dataset's splits to train on, or a part of one: `train[:10%]`."""
    val_split: str = ""
    """Which of them is held out for validation; empty for a part of `split`."""
    revision: str = ""
    """A commit, tag or branch of the dataset on the hub; empty for the newest. With a commit nobody asks the hub once all is cached."""
    streaming: bool = False
    """Read the dataset's records as they come, and keep only their ids: for one that is larger than the disk."""
    val_fraction: float = 0.05
    """Share of the records held out, by the hash of their content, where there are neither val_files nor a val_split."""
    tokenizer: str = ""
    """A directory with a `tokenizer.json`: the model's own, `${model.path}`."""
    on_bad: Literal["stop", "skip"] = "stop"
    """A record that is none, or that has nothing to learn: an error with file and line, or left out and counted."""
    cache_dir: str = ""
    """Where ids are kept, to be memory-mapped; empty for $FW_CACHE, else fw under the user's cache directory."""

    def __post_init__(self) -> None:
        if not (self.files or self.dataset):
            raise UserError("data.files: no files given; name some, or data.dataset")
        if self.dataset and (self.files or self.val_files):
            raise UserError("data.dataset: there are data.files too; leave one of them out")
        if not self.dataset and (given := [name for name, usual in _OF_A_DATASET.items() if getattr(self, name) != usual]):
            raise UserError(f"data.{given[0]}: is of a dataset, and there is no data.dataset")
        if not self.tokenizer:
            raise UserError("data.tokenizer: none given; name a directory with a tokenizer.json, ${model.path} for the model's own")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction: {self.val_fraction} is not between 0 and 1")


@dataclass
class JsonlConfig(RecordsConfig):
    """Which records, how they become tokens, and what is held out."""

    text: str = "text"
    """The field with a text, all of which is learnt."""
    prompt: str = "prompt"
    """Where a record has no text: the field with what comes first."""
    completion: str = "completion"
    """The field with what is learnt to follow it."""
    learn: Literal["completion", "all"] = "completion"
    """Whether the prompt is learnt, too."""


@dataclass
class ChatConfig(RecordsConfig):
    """Which records, how they become tokens, and what is held out."""

    messages: str = "messages"
    """The field with a conversation: a list of `role` and `content` (ShareGPT's `from` and `value` do as well). Records without it may have
    `prompt` and `completion`, texts or lists of messages."""
    tools: str = "tools"
    """The field with the tools that a conversation may use, as JSON schemas, where there are any."""
    chat_template: str | None = None
    """The name of one of the tokenizer's templates, or a template; empty for the tokenizer's default."""
    date: str = ""
    """The day that a template writes as today's (`strftime_now`), like 2026-07-26; empty for the one on which the data is prepared. A day
    that is given makes the same ids on any other, so that a run can go on where its cache is gone."""
    learn: Learnt = "assistant"
    """`assistant`: all its messages; `last`: the last of them; `all`: every token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _day(self.date)


@dataclass
class PreferenceConfig(RecordsConfig):
    """Which records, how they become tokens, and what is held out."""

    prompt: str = "prompt"
    """The field with what is answered: a text, or a list of messages. Without it both answers are whole conversations."""
    chosen: str = "chosen"
    """The field with the better answer: a text, or messages of which the last is the answer."""
    rejected: str = "rejected"
    """The field with the worse one."""
    chat_template: str | None = None
    """The name of one of the tokenizer's templates, or a template; empty for the tokenizer's default."""
    date: str = ""
    """The day that a template writes as today's (`strftime_now`), like 2026-07-26; empty for the one on which the data is prepared. A day
    that is given makes the same ids on any other, so that a run can go on where its cache is gone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _day(self.date)


class _Records(DataPlugin):
    """Encodes each record once, and keeps ids and what of them is learnt on disk."""

    config: RecordsConfig
    parts: ClassVar[tuple[str, ...]] = ("",)
    """Of each record, what the names of their files end in."""

    def __init__(self, config: RecordsConfig) -> None:
        super().__init__(config)
        self._directory: Path | None = None
        self._tokenizer: Tokenizer | None = None

    @abstractmethod
    def _encoded(self, record: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[Encoded, ...]:
        """A record's ids, for each of :attr:`parts`.

        Raises:
            UserError: what is wrong with it, as a clause about it.
        """

    def _check(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that does not do."""

    def _samples(self, directory: Path, split: str, dtype: str, most: int) -> MaskedRecords | PairedRecords:
        return MaskedRecords(directory, split, dtype, most)

    def prepare(self, say: Say) -> None:
        """Encode the records; once per files and settings."""
        self._tokenizer = tokenizer = load_tokenizer(self.config.tokenizer)
        self._check(tokenizer)
        found = {split: source for split, source in zip(_SPLITS, self._sources(), strict=True) if source is not None}
        content = [[split, *source.identity()] for split, source in found.items()]
        settings = {**asdict(self.config), "cache_dir": "", "tokenizer": tokenizer.fingerprint, "format": _FORMAT, "content": content}
        key = hashlib.sha256(json.dumps([type(self).__name__, settings], sort_keys=True).encode()).hexdigest()[:16]
        name = f"records-{key}"
        self._directory = cached(self.config.cache_dir, name, lambda made: self._build(made, found, tokenizer, say), resumes=True)

    def open(self, sequence_length: int) -> Corpus:
        """Map what :meth:`prepare` left on disk."""
        assert self._directory is not None and self._tokenizer is not None, "prepare() comes first"
        directory, tokenizer = self._directory, self._tokenizer
        meta = json.loads((directory / META).read_text())
        train, val = (self._samples(directory, split, meta["dtype"], sequence_length) for split in _SPLITS)
        for samples, what in ((train, "to train on"), (val, "held out")):
            if not samples.targets:
                raise UserError(
                    f"train.sequence_length: {sequence_length} cuts off all that is learnt of every record {what}; prompts fill it"
                )
        return Corpus(
            train=train,
            val=val,
            tokenizer=tokenizer,
            fingerprint=meta["fingerprint"],
            # As of streams, whose first id is no target.
            train_tokens=train.targets + 1,
            val_tokens=val.targets + 1,
            val_bytes=sum(len(each.encode()) for each in _texts(val, tokenizer)),
            train_text=lambda: list(_texts(train, tokenizer)),
            val_text=lambda: list(_texts(val, tokenizer)),
            lengths=lambda: np.sum([sizes_in(directory, f"train{part}") for part in self.parts], 0),
            facts={key: meta[key] for key in ("documents", "duplicates", "bad") if key in meta}
            | ({CUT_OFF: train.without_targets} if train.without_targets else {}),
        )

    def _sources(self) -> tuple[Source, Source | None]:
        """Of what is trained on, and of what is held out, if that is another."""
        c = self.config
        if c.dataset:
            train = DatasetRecords(c.dataset, c.subset, c.split, c.revision, c.streaming)
            return train, train.of(c.val_split) if c.val_split else None
        train_files, val_files = sources.find_files(c.files), sources.find_files(c.val_files)
        return FileRecords(train_files), FileRecords(val_files) if val_files else None

    def _build(self, directory: Path, found: Mapping[str, Source], tokenizer: Tokenizer, say: Say) -> None:
        dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        digest = hashlib.sha256(tokenizer.fingerprint.encode())
        skipped: list[tuple[int, str]] = []
        seen: set[str] = set()
        repeated = 0
        with ExitStack() as stack:
            writers = {
                split: [stack.enter_context(MaskedWriter(directory, split + part, dtype)) for part in self.parts] for split in _SPLITS
            }
            for split, source in found.items():
                for outcome in self._all(source, self._journal(directory, split), skipped):
                    held_out = split == "val" or ("val" not in found and _is_held_out(outcome.content, self.config.val_fraction))
                    for writer, part in zip(writers["val" if held_out else "train"], outcome.parts, strict=True):
                        writer.write(*part)
                    digest.update(json.dumps(outcome.parts).encode())
                    repeated += outcome.content in seen
                    seen.add(outcome.content)
        if skipped:
            say(f"data: {len(skipped)} bad records skipped, the first: {skipped[0][1]}")
        number = sum(written[0].records for written in writers.values())
        for written, what in ((writers["train"], "to train on"), (writers["val"], "for validation")):
            tokens, targets = (sum(getattr(writer, name) for writer in written) for name in ("tokens", "targets"))
            if not targets:
                raise Hopeless(f"data: no record is left {what}, of {number}; give more, or data.val_files")
            say(f"data: {written[0].records:,} records {what}, {tokens:,} tokens of which {targets:,} are learnt")
        for split in _SPLITS:
            self._journal(directory, split).remove()
        facts = {"documents": number, "duplicates": repeated, "bad": len(skipped)}
        (directory / META).write_text(json.dumps({"dtype": dtype, "fingerprint": digest.hexdigest(), **facts}))

    def _journal(self, directory: Path, split: str) -> Journal:
        return Journal(directory / f"{split}{_JOURNAL}", code_of(type(self)))

    def _all(self, source: Source, journal: Journal, skipped: list[tuple[int, str]]) -> Iterator[Outcome]:
        """Of each record that is not left out."""
        places: deque[str] = deque()
        own: list[tuple[int, str]] = []
        read = done = 0

        def bad(place: str, why: str, number: int | None = None) -> None:
            if self.config.on_bad == "stop":
                option = "dataset" if self.config.dataset else "files"
                raise Hopeless(f"data.{option}: {place}: {why}; correct it, or leave such records out with data.on_bad=skip")
            own.append((read if number is None else number, f"{place}: {why}"))

        def values() -> Iterator[Mapping[str, Any]]:
            nonlocal read
            for place, value in source.records(bad):
                read += 1
                places.append(place)
                yield value

        with Bar(desc="encoding", unit=" records") as bar:
            for outcome in outcomes(values(), self.encoder(self._tokenizer), (type(self), self.config), journal):
                bar.update()
                done += 1
                place = places.popleft()
                if outcome.wrong:
                    bad(place, outcome.wrong, done - 1)
                else:
                    yield outcome
        skipped += sorted(own, key=lambda each: each[0])

    def encoder(self, tokenizer: Tokenizer | None = None) -> Callable[[Mapping[str, Any]], Outcome]:
        """What makes ids of a record; with the tokenizer that the config names where none is given."""
        given = tokenizer or load_tokenizer(self.config.tokenizer)

        def encode(record: Mapping[str, Any]) -> Outcome:
            try:
                parts = self._encoded(record, given)
                content = json.dumps(record, sort_keys=True, default=_said)
            except UserError as error:
                return Outcome("", (), str(error))
            except RecursionError:
                return Outcome("", (), TOO_DEEP)
            if not all(any(part.learnt[1:]) for part in parts):
                return Outcome("", (), "it has nothing to learn")
            return Outcome(hashlib.sha256(content.encode()).hexdigest(), parts, "")

        return encode


class JsonlData(_Records):
    """Texts, or prompts with completions: a JSON object a line, or rows of Parquet; each record a sample."""

    api = 1
    Config = JsonlConfig
    config: JsonlConfig

    def _encoded(self, record: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[Encoded, ...]:
        c = self.config
        if record.get(c.text) is not None:
            return (conversation.text(tokenizer, _text(record, c.text)),)
        if record.get(c.prompt) is not None and record.get(c.completion) is not None:
            return (conversation.pair(tokenizer, _text(record, c.prompt), _text(record, c.completion), c.learn == "all"),)
        raise UserError(f"it has neither {c.text} nor {c.prompt} and {c.completion}, but {', '.join(record) or 'nothing'}")


class ChatData(_Records):
    """Conversations by the model's chat template: a JSON object a line, or rows of Parquet; the assistant's words are learnt."""

    api = 1
    Config = ChatConfig
    config: ChatConfig

    def _check(self, tokenizer: Tokenizer) -> None:
        tokenizer.marks_assistant(self.config.chat_template)  # which wants the template

    def _encoded(self, record: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[Encoded, ...]:
        c = self.config
        if record.get(c.messages) is not None:
            messages = conversation.messages_of(record[c.messages])
        elif record.get("prompt") is not None and record.get("completion") is not None:
            messages = [*_turn(record["prompt"], "user"), *_turn(record["completion"], "assistant")]
        else:
            raise UserError(f"it has neither {c.messages} nor prompt and completion, but {', '.join(record) or 'nothing'}")
        with on_day(_day(c.date)):
            return (conversation.conversation(tokenizer, messages, conversation.tools_of(record.get(c.tools)), c.chat_template, c.learn),)


class PreferenceData(_Records):
    """Two answers to the same, a chosen and a rejected one, by the model's chat template: what objective `dpo` learns from."""

    api = 1
    Config = PreferenceConfig
    config: PreferenceConfig
    parts = (".chosen", ".rejected")

    def _check(self, tokenizer: Tokenizer) -> None:
        tokenizer.marks_assistant(self.config.chat_template)

    def _encoded(self, record: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[Encoded, ...]:
        c = self.config
        if missing := [name for name in (c.chosen, c.rejected) if record.get(name) is None]:
            raise UserError(f"it has no {' and no '.join(missing)}, but {', '.join(record) or 'nothing'}")
        before = [] if record.get(c.prompt) is None else _turn(record[c.prompt], "user")
        if not before and isinstance(record[c.chosen], str):
            raise UserError(f"it has no {c.prompt}, and {c.chosen} is no list of messages")
        tools = conversation.tools_of(record.get("tools"))
        with on_day(_day(c.date)):
            return tuple(
                conversation.conversation(tokenizer, [*before, *_turn(record[name], "assistant")], tools, c.chat_template, "last")
                for name in (c.chosen, c.rejected)
            )

    def _samples(self, directory: Path, split: str, dtype: str, most: int) -> MaskedRecords | PairedRecords:
        return PairedRecords(directory, (f"{split}.chosen", f"{split}.rejected"), dtype, most)


def _day(given: str) -> date | None:
    try:
        return date.fromisoformat(given) if given else None
    except ValueError:
        raise UserError(f"data.date: '{given}' is no day, as 2026-07-26 is one") from None


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record[name]
    if not isinstance(value, str):
        raise UserError(f"{name} is a {type(value).__name__}, not a text")
    return value


def _turn(value: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": value}] if isinstance(value, str) else conversation.messages_of(value)


def _is_held_out(content: str, fraction: float) -> bool:
    """By the hash of the content alone: the same in every order of files, and of equal records all or none."""
    return int(content[:16], 16) < fraction * 2**64


def _said(value: Any) -> str:
    """Of what is no JSON, the same in every process: pictures and their like would tell where they are in memory."""
    return str(value) if isinstance(value, date | time | Decimal | bytes) else type(value).__name__


def _texts(samples: MaskedRecords | PairedRecords, tokenizer: Tokenizer) -> Iterator[str]:
    return (tokenizer.decode(ids, skip_special_tokens=True) for ids in samples.learnt())
