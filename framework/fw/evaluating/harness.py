"""Tasks of the evaluation harness (lm-eval, https://github.com/EleutherAI/lm-evaluation-harness) on fw's engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_eval
import lm_eval.evaluator
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from fw.bars import Bar
from fw.errors import UserError
from fw.evaluating.scoring import Continuation, scores, windows
from fw.inference.llm import LLM

_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_WITHOUT_EFFECT = ("do_sample", "num_beams")
_ANSWER = 256


class OnEngine(TemplateLM):  # type: ignore[misc]
    """What the harness asks of a model."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self._llm = llm

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        ends = self._llm.tokenizer.eos_id
        if ends is None:
            raise UserError("--tasks: the tokenizer has no token that ends a text, which the harness needs")
        return ends

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it."""
        begins = self._llm.tokenizer.bos_id
        return self.eot_token_id if begins is None else begins

    @property
    def max_length(self) -> int:
        """Tokens that the model sees of a text whose next one is scored."""
        return self._llm.engine.context - 1

    @property
    def tokenizer_name(self) -> str:
        """By which the harness tells its caches apart."""
        return self._llm.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """With what the tokenizer puts around a text, unless that is there or it is said otherwise."""
        begins = self._llm.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (begins and string.startswith(begins))
        return self._llm.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """For the harness's record; the tokenizer's own is the one that is used."""
        if isinstance(chat_template, str):
            raise UserError("--chat uses the tokenizer's own template")
        return self._llm.tokenizer.fingerprint if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, open for the answer or for more of the last message; without its system message where the template has
        no place for one, as the harness does it with other models."""

        def written(messages: list[dict[str, str]]) -> str:
            return self._llm.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        try:
            return written(chat_history)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return written(others)

    def _loglikelihood_tokens(self, requests: Sequence[Any], disable_tqdm: bool = False, **_: Any) -> list[tuple[float, bool]]:
        asked = [Continuation(before, own) for _, before, own in requests]
        with Bar(total=len(asked), desc="scoring", unit=" texts", shown=not disable_tqdm) as bar:
            found = scores(self._llm, asked, bar.update)
        return [(score.logprob, score.likeliest) for score in found]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Of each text, all of it."""
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        parts = [[*windows(ids, self.prefix_token_id, self._llm.engine.context)] for ids in texts]
        with Bar(total=sum(map(len, parts)), desc="scoring", unit=" texts", shown=not disable_tqdm) as bar:
            found = iter(scores(self._llm, [part for some in parts for part in some], bar.update))
        return [sum(next(found).logprob for _ in some) for some in parts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, each as its request wants it chosen and ended."""
        found: dict[int, str] = {}
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(repr(request.args[1]), []).append(number)
        for numbers in alike.values():
            settings = self._ending(_settings(requests[numbers[0]].args[1]))
            room = self._llm.engine.context - settings["max_tokens"]
            if room < 1:
                raise UserError(f"--tasks: an answer of {settings['max_tokens']} tokens leaves no room for what is asked")
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            answers = self._llm.generate(prompts, progress=not disable_tqdm, **settings)
            for number, answer in zip(numbers, answers, strict=True):
                if answer.error:
                    raise UserError(f"--tasks: an answer was not computed to its end: {answer.error}")
                found[number] = answer.text
        return [found[number] for number in range(len(requests))]

    def _ending(self, settings: dict[str, Any]) -> dict[str, Any]:
        """A text that is a special token ends an answer as the token; it is not in the text that an answer has."""
        tokenizer = self._llm.tokenizer
        ids = [token for text in settings["stop"] if (token := tokenizer.token_to_id(text)) in tokenizer.special_ids]
        return {**settings, "stop_token_ids": ids}


def _settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The harness's words for how an answer is chosen, as :class:`~fw.inference.options.Sampling` has them."""
    given = dict(normalize_gen_kwargs(dict(asked), _ANSWER))
    if not given.get("do_sample", given.get("temperature")):
        given["temperature"] = 0.0
    settings = {"stop": [text for text in given.pop("until", []) if text], "max_tokens": given.pop("max_gen_toks")}
    settings |= {name: given.pop(name) for name in _SETTINGS if given.get(name) is not None}
    if left := [name for name in given if name not in (*_WITHOUT_EFFECT, *_SETTINGS)]:
        raise UserError(f"--tasks: a task wants '{left[0]}' for its answers, which is not known here")
    return {**settings, "logprobs": None}


def run_tasks(
    llm: LLM,
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    shots: int | None = None,
    limit: int | None = None,
    chat: bool = False,
) -> dict[str, Any]:
    """The harness's results: ``results`` by task and metric, ``configs``, ``versions``, ``samples`` and others.

    Args:
        tasks: names, of groups too, or patterns of them.
        include: directory of further tasks.
        shots: examples before each question; None for the task's own number.
        limit: questions of each task.
        chat: put questions into the tokenizer's chat template.

    Raises:
        UserError: a task that is not known, or a model that cannot do what one needs.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=None if include is None else str(include))
    matched = [name for task in tasks for name in manager.match_tasks([task])]
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        raise UserError(f"--tasks: there is no task '{unknown[0]}'; lm-eval ls tasks lists them, and --include-path adds some")
    with _quiet():
        found = lm_eval.simple_evaluate(
            OnEngine(llm),
            tasks=list(dict.fromkeys(matched)),
            num_fewshot=shots,
            limit=limit,
            task_manager=manager,
            apply_chat_template=chat,
            bootstrap_iters=1000,
        )
    return dict(found or {})


@contextmanager
def _quiet() -> Iterator[None]:
    """The harness asks git, which complains where there is no repository, and draws bars where there is no terminal."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(lm_eval.evaluator, "get_git_commit_hash", lambda: None))
        if not sys.stderr.isatty():
            stack.enter_context(redirect_stderr(StringIO()))
        yield


def table(found: Mapping[str, Any]) -> str:
    """Of what :func:`run_tasks` gives."""
    told = str(make_table(found))
    return told + ("\n" + make_table(found, "groups") if found.get("groups") else "")
