"""Talk with a model in the terminal. /new begins anew, /exit ends; Ctrl-C ends an answer."""

from __future__ import annotations

import argparse
import sys

from fw.cli.generate import add_sampling, load, settings

EXAMPLES = """examples:
  fw chat path/to/model
  fw chat path/to/model --system "Answer in one sentence." --temperature 0.7"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and how tokens are chosen."""
    parser.add_argument("model", metavar="MODEL", help="model directory, adapter's directory, run directory, or org/name of the hub")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="kv_cache=…, quantization=…, offload.…, inference.…")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told first")
    add_sampling(parser)


def run(options: argparse.Namespace) -> int:
    """Until the end of input."""
    llm = load(options)
    given = {"max_tokens": None, **settings(options)}
    begin = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(begin)
    llm.encode([*begin, {"role": "user", "content": "?"}])  # a tokenizer that has no chat template says so now
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return 0
        if said == "/exit":
            return 0
        if said == "/new":
            messages = list(begin)
            continue
        if not said:
            continue
        messages.append({"role": "user", "content": said})
        answer = ""
        stream = llm.stream(messages, **given)
        try:
            for delta in stream:
                answer += delta.text
                print(delta.text, end="", flush=True)
        except KeyboardInterrupt:
            stream.close()  # what was said so far stays said
        print()
        messages.append({"role": "assistant", "content": answer})
