"""A file of prompts, and a file of answers, a line each.

A line is answered when its answer is there, in any order. What was answered before a run ended is not asked again: beside the answers lies
a note of which prompts and settings they belong to, until all are there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fw.config import PLUGINS
from fw.errors import UserError
from fw.inference.asking import Prompt
from fw.inference.llm import LLM
from fw.inference.openai import Asked, answered, asked
from fw.inference.options import Sampling
from fw.inference.results import Result
from fw.recipe.inference import INFERENCE, QUANTIZATION, InferenceRecipe

_AHEAD = 2
"""Times as many requests as run at once are read ahead."""
_DEEPEST = 100
"""Levels of lists and objects that a line may have: what reads and writes JSON gives up at different ones, all of them above this."""
_TOO_DEEP = f"lists and objects stand within one another more than {_DEEPEST} deep"
_SHOWN = 60
"""Characters of a value that a refusal shows."""
_PROMPTS = "prompts"
_SECTIONS = ("kv_cache", QUANTIZATION, PLUGINS)


@dataclass
class Progress:
    """How far a batch is.

    Attributes:
        before: lines that an earlier run answered.
        failed: lines that could not be answered; the answers' file says why.
        tokens: generated.
    """

    lines: int
    before: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _Line:
    """One that is being answered."""

    number: int
    given: Mapping[str, Any]
    asked: Asked


def circumstances_of(recipe: InferenceRecipe, adapter: str | Path | None, adapters: Mapping[str, str | Path]) -> dict[str, Any]:
    """What answers of a model depend on, besides it and what is asked: weights as they are read, caches, and adapters. How much is computed
    at once, where, and within which memory is left out, so that a batch which did not fit goes on with less.

    Args:
        adapter: directory of the one that is part of the model.
        adapters: directories of those that lines ask for, by name.
    """
    tree, options = recipe.config.tree, recipe.inference
    sections = {name: {"name": tree[name]} if isinstance(tree[name], str) else tree[name] for name in _SECTIONS if name in tree}
    return {
        "adapter": None if adapter is None else str(Path(adapter)),
        **{f"adapters {name}": str(Path(directory)) for name, directory in adapters.items()},
        **sections,
        **{f"{INFERENCE}.{name}": getattr(options, name) for name in ("dtype", "weights", "max_context")},
        **({f"{INFERENCE}.batch_invariant": True} if options.batch_invariant else {}),
    }


def run_batch(
    llm: LLM,
    source: Path,
    target: Path,
    settings: Mapping[str, Any],
    model: str,
    tell: Callable[[Progress], None],
    *,
    chat: bool = False,
    circumstances: Mapping[str, Any] | None = None,
) -> Progress:
    """Answer every line of a file.

    A line is ``{"prompt": …}`` or ``{"messages": […]}``, with further settings of its own, or a request of OpenAI's batch format. A line
    that cannot be answered is kept, with what is wrong with it.

    Args:
        settings: of requests that do not say.
        model: name that answers in OpenAI's format give.
        tell: is called after every step.
        chat: whether a prompt that is text is what a user says, in the model's chat template.
        circumstances: what else answers depend on, see :func:`circumstances_of`.

    Raises:
        UserError: the files cannot be read or written, or the answers there belong to another batch.
    """
    defaults = llm.sampling(**settings)
    count, digest = _looked_at(source)
    note = target.with_name(f".{target.name}.unfinished")
    belongs = {_PROMPTS: digest, "model": model, "chat": chat, **vars(defaults), **(circumstances or {})}
    answered_before = _go_on(target, note, belongs)
    progress = Progress(count, before=len(answered_before))
    tell(progress)
    try:
        out = target.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: {target} cannot be written: {error.strerror}") from None
    with out:
        _answer(llm, source, out, answered_before, defaults, model, progress, tell, chat)
        out.flush()
        os.fsync(out.fileno())
    note.unlink()
    return progress


def _answer(
    llm: LLM,
    source: Path,
    out: TextIO,
    before: set[int],
    defaults: Sampling,
    model: str,
    progress: Progress,
    tell: Callable[[Progress], None],
    chat: bool,
) -> None:
    lines = (each for each in _lines(source) if each[0] not in before)
    running: dict[str, _Line] = {}
    most = _AHEAD * llm.engine.scheduler.most
    more = True
    try:
        while more or running:
            while more and len(running) < most:
                if (following := next(lines, None)) is None:
                    more = False
                    break
                number, text = following
                given: Any = None
                try:
                    given = _parsed(text)
                    line = _Line(number, given, _asked(llm, given, defaults, chat))
                    llm.engine.add(f"line {number}", llm.encode(line.asked.prompt), line.asked.sampling, adapter=line.asked.adapter)
                    running[f"line {number}"] = line
                except UserError as error:
                    _write(out, _refused(number, given, text, str(error)))
                    progress.done, progress.failed = progress.done + 1, progress.failed + 1
            deltas, results = llm.step()
            progress.tokens += sum(delta.token is not None for delta in deltas)
            for result in results:
                line = running.pop(result.key)
                if result.error:
                    progress.failed += 1
                    _write(out, _refused(line.number, line.given, json.dumps(line.given), result.error))
                else:
                    _write(out, _told(llm, line, result, model))
                progress.done += 1
            tell(progress)
    finally:
        for key in running:
            llm.engine.abort(key)


def _looked_at(source: Path) -> tuple[int, str]:
    """Lines that are not empty, and a digest of all."""
    digest, count = hashlib.sha256(), 0
    try:
        with source.open("rb") as file:
            for line in file:
                digest.update(line)
                count += bool(line.strip())
    except OSError as error:
        raise UserError(f"--input: {source} cannot be read: {error.strerror}") from None
    if not count:
        raise UserError(f"--input: {source} has no line")
    return count, digest.hexdigest()


def _go_on(target: Path, note: Path, belongs: Mapping[str, Any]) -> set[int]:
    """Numbers of the lines that are answered already."""
    written = json.dumps(belongs)
    if not note.exists():
        if target.exists():
            raise UserError(f"--output: {target} exists already; give another file, or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = note.with_name(f"{note.name}.part")
        aside.write_text(written)
        aside.replace(note)
        return set()
    if other := _differing(json.loads(note.read_text()), json.loads(written)):
        raise UserError(f"--output: {target} is half of another batch ({'; '.join(other)}); ask as that did, or remove it and {note}")
    if not target.exists():
        return set()
    data = target.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):  # the last line was being written when the run ended
        os.truncate(target, whole)
    return {json.loads(line)["line"] for line in data[:whole].splitlines()}


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what two batches differ, for a person."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [
        "other prompts" if name == _PROMPTS else f"{name}: {_shown(before.get(name))}, and now {_shown(now.get(name))}" for name in names
    ]


def _shown(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _lines(source: Path) -> Iterator[tuple[int, str]]:
    with source.open(encoding="utf-8", errors="surrogateescape") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from None
    except RecursionError:
        raise UserError(_TOO_DEEP) from None
    if not isinstance(given, dict):
        raise UserError("not a JSON object")
    level: list[Any] = [given]
    for _ in range(_DEEPEST):
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each) if isinstance(inner, dict | list)]
    if level:
        raise UserError(_TOO_DEEP)
    return given


def _asked(llm: LLM, given: Mapping[str, Any], defaults: Sampling, chat: bool) -> Asked:
    if "body" in given:
        if not isinstance(given["body"], dict):
            raise UserError("body: not a JSON object")
        found = asked(llm, str(given.get("url")), given["body"])
        if found.chat:
            _check_messages(found.prompt)
        return found
    kinds = [key for key in ("prompt", "messages") if key in given]
    if len(kinds) != 1:
        raise UserError("a line has either 'prompt', or 'messages', or OpenAI's 'custom_id', 'url' and 'body'")
    own = {key: value for key, value in given.items() if key not in ("id", "adapter", *kinds)}
    adapter = given.get("adapter")
    if not isinstance(adapter, str | None):
        raise UserError(f"adapter: {adapter!r} is no name; give that of one that is loaded, or leave it out")
    prompt = given[kinds[0]]
    if kinds == ["messages"]:
        _check_messages(prompt)
    elif chat:
        if not isinstance(prompt, str):
            raise UserError(f"prompt: {prompt!r} is not what a user says; give a text, or 'messages'")
        prompt = [{"role": "user", "content": prompt}]
    return Asked(prompt, llm.sampling(**{**vars(defaults), **own}), chat=chat or kinds == ["messages"], adapter=adapter)


def _check_messages(given: Prompt) -> None:
    """Refuse what would be read as text or ids."""
    many = given if isinstance(given, Sequence) else []
    if not many or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in many):
        raise UserError(f"messages: {given!r} is no list of messages with role and content")


def _told(llm: LLM, line: _Line, result: Result, model: str) -> dict[str, Any]:
    if "body" in line.given:
        body = answered(llm, line.asked, result, line.asked.adapter or model)
        response = {"status_code": 200, "request_id": body["id"], "body": body}
        return {
            "line": line.number,
            "id": f"batch_req_{line.number}",
            "custom_id": line.given.get("custom_id"),
            "response": response,
            "error": None,
        }
    first = result.completions[0]
    told: dict[str, Any] = {"line": line.number, **_named(line.given), "text": first.text, "token_ids": first.token_ids}
    told["finish_reason"] = first.finish_reason
    sampling = line.asked.sampling
    if sampling.logprobs is not None:
        told["logprobs"] = first.logprobs
    if sampling.logprobs:
        told["top_logprobs"] = first.top_logprobs
    if sampling.prompt_logprobs is not None:
        told["prompt_logprobs"] = result.prompt_logprobs
    if len(result.completions) > 1:
        told["others"] = [{"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason} for c in result.completions[1:]]
    return told


def _named(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": given["id"]} if "id" in given else {}


def _refused(number: int, given: Any, text: str, why: str) -> dict[str, Any]:
    """A line that cannot be answered, as it was."""
    if isinstance(given, dict) and "body" in given:
        error = {"code": "invalid_request", "message": why}
        return {"line": number, "id": f"batch_req_{number}", "custom_id": given.get("custom_id"), "response": None, "error": error}
    kept = given if isinstance(given, dict) else text.rstrip("\n").encode("utf-8", "replace").decode()
    return {"line": number, **(_named(given) if isinstance(given, dict) else {}), "error": why, "input": kept}


def _write(out: TextIO, told: Mapping[str, Any]) -> None:
    """A line at once, so that a run that ends now has lost none."""
    out.write(json.dumps(told, ensure_ascii=True) + "\n")
    out.flush()
