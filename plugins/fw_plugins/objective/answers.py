"""What a teacher says of rows, in files: of every token the most likely ones that may follow, and how likely they are.

A directory holds ``answers.json``, which says whose they are, and ``part-N.safetensors``, each of them whole or not there:

- ``keys`` int64 ``[R]``: of a row, by its tokens and which of them see each other (:func:`row_keys`);
- ``ends`` int64 ``[R]``: where its tokens end among all of the part;
- ``ids`` int32 ``[T, k]``, ``logps`` fp16 ``[T, k]``: the k most likely tokens, and the logarithms of their probabilities at
  the temperature;
- ``rest`` fp32 ``[T]``: the logarithm of what all others have together.

That is k · 6 + 4 bytes a token, where logits of 32,000 tokens have 64,000.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fw.api import UserError

DESCRIPTION = "answers.json"
_FORMAT = 2
_PART_TOKENS = 1 << 18


class Answers(NamedTuple):
    """Of tokens T: the k that are most likely to follow each, and how likely they and all others are."""

    ids_Tk: Tensor
    logp_Tk: Tensor
    rest_T: Tensor

    def rows(self, rows: slice) -> Answers:
        """Of some tokens."""
        return Answers(*(tensor[rows] for tensor in self))


@dataclass(frozen=True)
class Asked:
    """What answers depend on, besides rows.

    Attributes:
        weights: :func:`fw.api.weights_digest`; empty where the teacher is not there any more, which is not compared then.
    """

    teacher: str
    weights: str
    quantization: str
    temperature: float
    top_k: int
    vocab_size: int


def row_keys(batch: Mapping[str, Tensor]) -> tuple[list[int], list[int]]:
    """Of each row a number that tells it from others, and its tokens without padding at its end."""
    ids_BL = batch["input_ids"].cpu().numpy()
    segments_BL = batch["segments"].cpu().numpy() if "segments" in batch else np.ones_like(ids_BL)
    keys, lengths = [], []
    for ids_L, segments_L in zip(ids_BL, segments_BL, strict=True):
        length = int(np.flatnonzero(segments_L)[-1]) + 1 if segments_L.any() else 0
        begins = np.flatnonzero(np.diff(segments_L[:length]))
        told = hashlib.blake2b(ids_L[:length].astype(np.int64).tobytes(), digest_size=8)
        told.update(begins.astype(np.int64).tobytes())
        keys.append(int.from_bytes(told.digest(), "little", signed=True))
        lengths.append(length)
    return keys, lengths


class AnswerWriter:
    """Adds rows to a directory; what an earlier one has written of the same teacher stays.

    Raises:
        UserError: there are answers of another one, somebody else is writing, or it cannot be written to.
    """

    def __init__(self, directory: Path, asked: Asked) -> None:
        self._directory = directory
        self.known: set[int] = set()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / ".lock").open("w")  # until this object goes, also by a kill
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"objective.answers: another process writes to {directory}; wait for it") from None
            if (directory / DESCRIPTION).exists():
                there = AnswerFiles(directory, asked)
                self.known = set(there.keys.tolist())
            else:
                _write(directory / DESCRIPTION, json.dumps({"format": _FORMAT, **asdict(asked)}, indent=1))
        except OSError as error:
            raise UserError(f"objective.answers: {directory} cannot be written: {error.strerror}") from None
        self._next = 1 + max((int(part.stem.split("-")[1]) for part in directory.glob("part-*.safetensors")), default=-1)
        self._rows: list[tuple[int, Answers]] = []
        self._tokens = 0

    def add(self, key: int, answers: Answers) -> None:
        """Of a row, on the host."""
        if key not in self.known:
            self.known.add(key)
            self._rows.append((key, answers))
            self._tokens += len(answers.ids_Tk)
            if self._tokens >= _PART_TOKENS:
                self.flush()

    def flush(self) -> None:
        """What has been added is in files."""
        if not self._rows:
            return
        ids_Tk, logp_Tk, rest_T = (torch.cat(of) for of in zip(*(answers for _, answers in self._rows), strict=True))
        tensors = {
            "keys": torch.tensor([key for key, _ in self._rows]),
            "ends": torch.tensor([len(answers.ids_Tk) for _, answers in self._rows]).cumsum(0),
            "ids": ids_Tk.to(torch.int32).contiguous(),
            "logps": logp_Tk.to(torch.float16).contiguous(),
            "rest": rest_T.float().contiguous(),
        }
        path = self._directory / f"part-{self._next:05d}.safetensors"
        hidden = path.with_name(f".{path.name}.tmp")
        save_file(tensors, hidden)
        os.replace(hidden, path)
        self._next, self._rows, self._tokens = self._next + 1, [], 0

    def close(self) -> None:
        """Let others write."""
        self.flush()
        self._lock.close()


class AnswerFiles:
    """Reads them, row by row, from mapped files.

    Raises:
        UserError: there are none, or they are somebody else's answers.
    """

    def __init__(self, directory: Path, asked: Asked) -> None:
        self._directory = directory
        path = directory / DESCRIPTION
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError):
            raise UserError(f"objective.answers: {path} is not there or cannot be read; make it with fw data teach CONFIG") from None
        for key, own in {"format": _FORMAT, **asdict(asked)}.items():
            if key == "weights" and not own:
                continue
            if key == "weights" and said.get(key) != own:
                raise UserError(
                    f"objective.answers: those of {directory} were given by other weights of {asked.teacher}; give another directory"
                )
            if said.get(key) != own:
                raise UserError(f"objective.answers: those of {directory} were given with {key}={said.get(key)}, the config means {own}")
        self._parts: list[Any] = []
        keys, places = [np.zeros(0, np.int64)], [np.zeros((0, 3), np.int64)]
        for number, part in enumerate(sorted(directory.glob("part-*.safetensors"))):
            try:
                file = safe_open(part, "pt")
            except SafetensorError as error:
                raise UserError(f"objective.answers: {part} is damaged ({error}); remove it, and run fw data teach CONFIG again") from None
            self._parts.append(file)
            ends = file.get_tensor("ends").numpy()
            keys.append(file.get_tensor("keys").numpy())
            places.append(np.stack([np.full_like(ends, number), np.concatenate([[0], ends[:-1]]), ends], 1))
        order = np.argsort(all_keys := np.concatenate(keys), kind="stable")
        self.keys, self._places = all_keys[order], np.concatenate(places)[order]

    def of(self, batch: Mapping[str, Tensor]) -> Answers:
        """For every token of a batch, row after row, on its device; padding gets zeros.

        Raises:
            UserError: a row that nobody was asked about.
        """
        device, width = batch["input_ids"].device, batch["input_ids"].shape[1]
        rows = list(self._rows(*row_keys(batch), width))
        ids_Tk, logp_Tk, rest_T = (torch.cat(of).to(device) for of in zip(*rows, strict=True))
        return Answers(ids_Tk.long(), logp_Tk.float(), rest_T)

    def _rows(self, keys: list[int], lengths: list[int], width: int) -> Iterator[Answers]:
        for key, length in zip(keys, lengths, strict=True):
            place = int(np.searchsorted(self.keys, key))
            found = length == 0 or (place < len(self.keys) and self.keys[place] == key)
            part, begin, end = self._places[place].tolist() if found and length else (0, 0, 0)
            if not found or end - begin != length:
                raise UserError(
                    f"objective.answers: {self._directory} has none for a row of this run ({length} tokens); other data, packing or"
                    " train.max_steps than it was made for? Run fw data teach CONFIG again, which adds what is missing"
                )
            if not length:  # a row of padding; the shapes are any part's
                part = 0
            file = self._parts[part]
            tensors = [file.get_slice(name)[begin:end] for name in ("ids", "logps", "rest")]
            padding = width - length
            yield Answers(*(torch.cat([t, t.new_zeros(padding, *t.shape[1:])]) if padding else t for t in tensors))


def _write(path: Path, text: str) -> None:
    hidden = path.with_name(f".{path.name}.tmp")
    hidden.write_text(text)
    os.replace(hidden, path)
