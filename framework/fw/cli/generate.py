"""Generate text with a model: an answer as it comes, or a file of answers for a file of prompts."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fw.errors import UserError

if TYPE_CHECKING:
    from fw.inference.llm import LLM
    from fw.recipe.inference import InferenceRecipe

EXAMPLES = """examples:
  fw generate runs/quickstart "The list of arguments" --max-tokens 60
  fw generate path/to/model --input prompts.jsonl --output answers.jsonl --temperature 0
  fw generate path/to/model "Once" inference.dtype=bf16 inference.kv_budget=2GiB kv_cache=contiguous
  echo "Once" | fw generate path/to/model inference.dtype=bf16

a line of --input: {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}, with "id", "max_tokens", "adapter" and so on, or a
request of OpenAI's batch format. Run again with the same files after a kill, it answers what is missing."""

_NUMBERS: Mapping[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens of an answer (256)"),
    "min_tokens": (int, "before which nothing ends it (0)"),
    "temperature": (float, "that logits are divided by; 0 takes the likeliest (the model's own, or 1)"),
    "top_k": (int, "only that many likeliest tokens"),
    "top_p": (float, "only the likeliest tokens of this probability together"),
    "min_p": (float, "only tokens of this share of the likeliest one's probability"),
    "repetition_penalty": (float, "above 1, tokens that were there are less likely"),
    "presence_penalty": (float, "taken from logits of tokens the answer has"),
    "frequency_penalty": (float, "the same, for each time"),
    "seed": (int, "of the choice"),
}
_OF_FILES: Mapping[str, tuple[type, str]] = {
    "n": (int, "answers to each prompt (1); of --output"),
    "logprobs": (int, "log-probabilities of the tokens, and of so many likeliest; of --output"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, prompts, and how tokens are chosen."""
    parser.add_argument("model", metavar="MODEL", help="model directory, adapter's directory, run directory, or org/name of the hub")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="text to go on from, unless it reads as key=value; else standard input")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="kv_cache=…, quantization=…, offload.…, inference.…")
    parser.add_argument("--input", type=Path, metavar="FILE", help="prompts, a line of JSON each")
    parser.add_argument("--output", type=Path, metavar="FILE", help="answers, a line of JSON each, as they come")
    parser.add_argument(
        "--adapters", action="append", default=[], metavar="NAME=DIR", help="adapters that lines ask for; may be given again"
    )
    parser.add_argument("--chat", action="store_true", help="a prompt is what a user says, in the model's chat template")
    add_sampling(parser)
    _add_numbers(parser, _OF_FILES)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """The adapter, and how tokens are chosen."""
    parser.add_argument("--adapter", metavar="DIR", help="adapter of the model, fw's or peft's")
    _add_numbers(parser, _NUMBERS)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends an answer; may be given again")
    parser.add_argument("--json-schema", type=_text_or_file, metavar="JSON|FILE", help="answers are JSON by this schema; {} for any")
    parser.add_argument("--regex", metavar="REGEX", help="answers are what this matches")
    parser.add_argument("--grammar", type=_text_or_file, metavar="LARK|FILE", help="answers are of this grammar")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on at the model's own end")


def _add_numbers(parser: argparse.ArgumentParser, numbers: Mapping[str, tuple[type, str]]) -> None:
    for name, (kind, text) in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=text)


def _text_or_file(given: str) -> str:
    """What is in the file of this name, if there is one."""
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return given


def run(options: argparse.Namespace) -> int:
    """Write the answer as it comes, or the file of answers."""
    if (options.input is None) != (options.output is None):
        raise UserError("--input and --output go together")
    if options.input is not None:
        if options.prompt is not None:
            options.overrides = [options.prompt, *options.overrides]
        return _batch(options)
    _refuse_what_files_have(options)
    prompt = options.prompt
    if prompt is not None and _reads_as_override(prompt):
        options.overrides, prompt = [prompt, *options.overrides], None
    if prompt is None:
        if sys.stdin.isatty():
            raise UserError("there is no prompt; give one, ahead of any key=value, or --input FILE --output FILE")
        prompt = sys.stdin.read()
    llm = load(options)
    return _stream(llm, prompt, options)


def _refuse_what_files_have(options: argparse.Namespace) -> None:
    if (options.n or 1) > 1:
        raise UserError("--n: several answers come with --input and --output")
    if options.logprobs is not None:
        raise UserError("--logprobs: log-probabilities are written with --input and --output")
    if options.adapters:
        raise UserError("--adapters: lines of --input ask for these by their names; give --adapter DIR to a single prompt")


def _reads_as_override(word: str) -> bool:
    """Whether it sets something of a section that generating has, as ``kv_cache=contiguous`` does, and ``x=1`` does not."""
    key, equals, _ = word.partition("=")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        return False
    from fw.recipe.inference import SECTIONS

    return key.partition(".")[0] in SECTIONS


def load(options: argparse.Namespace) -> LLM:
    """The model, as overrides say."""
    return _loaded(options, _recipe(options))


def _recipe(options: argparse.Namespace) -> InferenceRecipe:
    from fw.config import Config, overridden
    from fw.recipe.inference import resolve_inference

    return resolve_inference(overridden(Config("generate", {}, {}), options.overrides))


def _loaded(options: argparse.Namespace, recipe: InferenceRecipe) -> LLM:
    from fw.planning.llm import LLM

    return LLM.of(options.model, recipe, options.adapter, lambda told: print(told, file=sys.stderr))


def _named_adapters(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Names and directories."""
    named = []
    for words in options.adapters:
        name, _, directory = words.partition("=")
        if not (name and directory):
            raise UserError(f"--adapters {words}: give NAME=DIR, the name that lines ask for and the adapter's directory")
        named.append((name, directory))
    return named


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What was said of how tokens are chosen."""
    names = [*_NUMBERS, *_OF_FILES, "stop", "json_schema", "regex", "grammar", "ignore_eos"]
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _stream(llm: LLM, prompt: str, options: argparse.Namespace) -> int:
    for delta in llm.stream([{"role": "user", "content": prompt}] if options.chat else prompt, **settings(options)):
        print(delta.text, end="", flush=True)
    print()
    return 0


def _guesses(llm: LLM) -> str:
    engine = llm.engine
    return f"; {engine.right_guesses:,} of {engine.guesses:,} guesses were right" if engine.guesses else ""


def _rates(tokens: int, seconds: float, read_bytes: int, most: float) -> str:
    """Tokens per second, and what was read of memory for them.

    Args:
        read_bytes: weights, keys and values; told where it is known how fast memory can be read.
        most: bytes per second that memory gives; 0 where that is not known.
    """
    read = f", {read_bytes / seconds / 1e9:.1f} of {most / 1e9:.1f} GB/s" if most else ""
    return f"{tokens / seconds:,.0f} tokens/s{read}"


def _batch(options: argparse.Namespace) -> int:
    import time

    from fw.bars import Bar
    from fw.inference.batch import Progress, run_batch
    from fw.inference.batch_files import circumstances_of
    from fw.meter.bandwidth import read_bandwidth

    recipe, adapters = _recipe(options), _named_adapters(options)
    llm = _loaded(options, recipe)
    for name, directory in adapters:
        llm.load_adapter(name, directory)
    shown = sys.stderr.isatty()
    most = read_bandwidth(llm.device) if shown and llm.engine.reads.step_bytes else 0.0
    begin = time.perf_counter()
    with Bar(desc="generating", unit=" lines") as bar:

        def tell(progress: Progress) -> None:
            if not progress.done:  # what an earlier run answered says nothing of how fast this one is
                bar.total, bar.initial, bar.last_print_n = progress.lines, progress.before, progress.before
            bar.n = progress.before + progress.done
            seconds = time.perf_counter() - begin
            bar.set_postfix_str(_rates(progress.tokens, seconds, llm.engine.read_bytes, most), refresh=False)
            bar.update(0)

        progress = run_batch(
            llm,
            options.input,
            options.output,
            settings(options),
            str(options.model),
            tell,
            chat=options.chat,
            circumstances=circumstances_of(recipe, options.model, options.adapter, dict(adapters)),
        )
    seconds = time.perf_counter() - begin
    kept = f", {progress.before} from before" if progress.before else ""
    print(
        f"{options.output}: {progress.done - progress.failed} answers, {progress.tokens:,} tokens in {seconds:.1f} s"
        f" ({_rates(progress.tokens, seconds, 0, 0)}){kept}{_guesses(llm)}"
    )
    if progress.failed:
        print(f"fw: warning: {progress.failed} lines could not be answered; {options.output} says why", file=sys.stderr)
    return 0
