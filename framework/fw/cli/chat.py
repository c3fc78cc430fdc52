"""Talk with a model in the terminal. /new begins anew, /exit ends; Ctrl-C ends an answer."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fw.cli.generate import add_sampling, load, settings
from fw.errors import EXIT_OK, EXIT_USER, UserError

if TYPE_CHECKING:
    from fw.inference.llm import LLM

EXAMPLES = """examples:
  fw chat path/to/model
  fw chat path/to/model --system "Answer in one sentence." --temperature 0.7"""

Message = Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and how tokens are chosen."""
    parser.add_argument("model", metavar="MODEL", help="model directory, adapter's directory, run directory, or org/name of the hub")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="kv_cache=…, quantization=…, offload.…, inference.…")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_sampling(parser)


def run(options: argparse.Namespace) -> int:
    """Until the end of input. What cannot be answered is said, and the conversation goes on without it."""
    llm = load(options)
    given = {"max_tokens": None, **settings(options)}
    begin: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
    llm.sampling(**given)
    llm.encode([*begin, {"role": "user", "content": "?"}])  # a tokenizer that has no chat template says so now
    turns: list[Message] = []
    code = EXIT_OK
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return code
        if said == "/exit":
            return code
        if said == "/new":
            turns = []
        elif said:
            try:
                turns = _answered(llm, begin, [*turns, {"role": "user", "content": said}], given)
            except UserError as error:
                print(f"fw: error: {error}", file=sys.stderr)
                code = EXIT_USER


def _answered(llm: LLM, begin: Sequence[Message], turns: Sequence[Message], given: Mapping[str, Any]) -> list[Message]:
    """The turns, as far as the model has read them, and its answer, which is printed as it comes."""
    read = _fitting(llm, begin, turns, given["max_tokens"])
    if left_out := len(turns) - len(read):
        print(f"fw: warning: the conversation is longer than the context; its oldest {left_out} messages are left out", file=sys.stderr)
    answer = ""
    stream = llm.stream([*begin, *read], **given)
    try:
        for delta in stream:
            answer += delta.text
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        stream.close()  # what was said so far stays said
    finally:
        print()
    return [*read, {"role": "assistant", "content": answer}]


def _fitting(llm: LLM, begin: Sequence[Message], turns: Sequence[Message], max_tokens: int | None) -> Sequence[Message]:
    """The newest turns, as many as leave room for an answer.

    Where nobody said how long that may be it has a quarter of the context, so that a long conversation is not shortened, and read anew,
    at each turn.

    Raises:
        UserError: the last turn alone is too long.
    """
    context = llm.engine.context
    room = min(context // 4 if max_tokens is None else max_tokens, context // 2)
    while (tokens := len(llm.encode([*begin, *turns]))) + room > context and len(turns) > 1:
        turns = turns[2:]  # what was said and what was answered: templates want them in turn
    if tokens >= context:
        raise UserError(f"what was said takes {tokens} tokens, and prompt and answer together have {context}; say it in fewer words")
    return turns
