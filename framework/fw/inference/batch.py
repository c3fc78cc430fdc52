"""A file of prompts, and a file of answers, a line each.

A line is answered when its answer is there, in any order. What was answered before a run ended is not asked again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from fw.errors import UserError, describe
from fw.inference.asking import Prompt, over, sampling
from fw.inference.batch_files import PROMPTS, answered_lines, claimed, lines, looked_at
from fw.inference.llm import LLM
from fw.inference.openai import Asked, answered, asked, plain
from fw.inference.results import Completion, Result

_AHEAD = 2
"""Times as many requests as run at once are read ahead."""
_DEEPEST = 100
"""Levels of lists and objects that a line may have: what reads and writes JSON gives up at different ones, all of them above this."""
_TOO_DEEP = f"lists and objects stand within one another more than {_DEEPEST} deep"


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
        circumstances: what else answers depend on, see :func:`fw.inference.batch_files.circumstances_of`.

    Raises:
        UserError: the files cannot be read or written, or the answers there belong to another batch.
    """
    defaults = sampling(llm.defaults, settings)
    count, digest = looked_at(source)
    note = target.with_name(f".{target.name}.unfinished")
    belongs = {PROMPTS: digest, "model": model, "chat": chat, **vars(defaults), **(circumstances or {})}
    with claimed(target, note, belongs):
        before = answered_lines(target, note)
        progress = Progress(count, before=len(before))
        tell(progress)
        try:
            out = target.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"--output: {target} cannot be written: {error.strerror}") from None
        with out:
            _answer(llm, source, out, before, settings, model, progress, tell, chat)
            out.flush()
            os.fsync(out.fileno())
        if progress.before + progress.done != progress.lines:
            raise UserError(f"--input: {source} has other lines than when the batch began; {target} has answers of those that were there")
        note.unlink()
    return progress


def _answer(
    llm: LLM,
    source: Path,
    out: TextIO,
    before: set[int],
    settings: Mapping[str, Any],
    model: str,
    progress: Progress,
    tell: Callable[[Progress], None],
    chat: bool,
) -> None:
    missing = (each for each in lines(source) if each[0] not in before)
    running: dict[str, _Line] = {}
    most = _AHEAD * llm.engine.scheduler.most
    more = True
    try:
        while more or running:
            while more and len(running) < most:
                if (following := next(missing, None)) is None:
                    more = False
                    break
                number, text = following
                given: Any = None
                try:
                    given = _parsed(text)
                    line = _Line(number, given, _asked(llm, given, settings, chat))
                    llm.engine.add(f"line {number}", llm.encode(line.asked.prompt), line.asked.sampling, adapter=line.asked.adapter)
                    running[f"line {number}"] = line
                except Exception as error:  # whatever stands in a line, the others are answered
                    _write(out, _refused(number, given, text, describe(error)))
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


def _asked(llm: LLM, given: Mapping[str, Any], settings: Mapping[str, Any], chat: bool) -> Asked:
    if "body" in given:
        if not isinstance(given["body"], dict):
            raise UserError("body: not a JSON object")
        found = asked(llm, str(given.get("url")), given["body"], settings)
        return replace(found, prompt=_messages(found.prompt)) if found.chat else found
    kinds = [key for key in ("prompt", "messages") if key in given]
    if len(kinds) != 1:
        raise UserError("a line has either 'prompt', or 'messages', or OpenAI's 'custom_id', 'url' and 'body'")
    own = {key: value for key, value in given.items() if key not in ("id", "adapter", *kinds)}
    adapter = given.get("adapter")
    if not isinstance(adapter, str | None):
        raise UserError(f"adapter: {adapter!r} is no name; give that of one that is loaded, or leave it out")
    prompt = given[kinds[0]]
    if kinds == ["messages"]:
        prompt = _messages(prompt)
    elif chat:
        if not isinstance(prompt, str):
            raise UserError(f"prompt: {prompt!r} is not what a user says; give a text, or 'messages'")
        prompt = [{"role": "user", "content": prompt}]
    return Asked(prompt, sampling(llm.defaults, over(settings, own)), chat=chat or kinds == ["messages"], adapter=adapter)


def _messages(given: Prompt) -> list[dict[str, Any]]:
    """As templates take them; refuses what would be read as text or ids."""
    many = given if isinstance(given, Sequence) else []
    if not many or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in many):
        raise UserError(f"messages: {given!r} is no list of messages with role and content")
    return [plain(each) for each in many if isinstance(each, Mapping)]


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
    told |= _logprobs(line, first)
    if line.asked.sampling.prompt_logprobs is not None:
        told["prompt_logprobs"] = result.prompt_logprobs
    if line.asked.sampling.prompt_logprobs:
        told["prompt_top_logprobs"] = result.prompt_top_logprobs
    if len(result.completions) > 1:
        told["others"] = [
            {"text": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason, **_logprobs(line, c)}
            for c in result.completions[1:]
        ]
    return told


def _logprobs(line: _Line, completion: Completion) -> dict[str, Any]:
    """Of its tokens, as far as they were asked for."""
    told: dict[str, Any] = {}
    if line.asked.sampling.logprobs is not None:
        told["logprobs"] = completion.logprobs
    if line.asked.sampling.logprobs:
        told["top_logprobs"] = completion.top_logprobs
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
