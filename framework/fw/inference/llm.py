"""Text from a model, in Python."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from fw.bars import Bar
from fw.config import Config, format_size
from fw.config.origin import Origin
from fw.errors import UserError, describe
from fw.inference import asking
from fw.inference.asking import Prompt
from fw.inference.background import Background, Told
from fw.inference.load import load, weight_bytes
from fw.inference.options import Sampling
from fw.inference.results import Delta, Pooling, Result
from fw.inference.uninterrupted import uninterrupted
from fw.locate import ADAPTER_CONFIG, settled
from fw.recipe.inference import INFERENCE, InferenceRecipe, resolve_inference


class LLM:
    """A model that generates.

    Args:
        path: a model directory, an adapter's, a run of fw's own, or ``org/name`` of the hub.
        kv_cache: a plugin by name, or its section: ``{"name": "paged", "block_size": 32}``.
        quantization: a plugin for the weights, likewise; None for as the files are.
        offload: where weights are that memory is short for: ``{"params": "nvme", "budget": "4GiB"}``; None for all in memory.
        adapter: directory of an adapter of the model.
        options: of the section ``inference``, :class:`fw.config.InferenceSection`: ``dtype``, ``kv_budget``, ``max_context`` and others.

    Raises:
        UserError: there is no such model, plugin or option.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        kv_cache: str | Mapping[str, Any] = "paged",
        quantization: str | Mapping[str, Any] | None = None,
        offload: str | Mapping[str, Any] | None = None,
        adapter: str | Path | None = None,
        **options: Any,
    ) -> None:
        tree: dict[str, Any] = {"kv_cache": kv_cache, INFERENCE: options}
        tree |= {name: given for name, given in (("quantization", quantization), ("offload", offload)) if given is not None}
        said = Origin("argument")
        recipe = resolve_inference(Config("LLM", tree, {(section,): said for section in tree}))
        self._begin(path, recipe, adapter)

    @classmethod
    def of(cls, path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None = None, say: Callable[[str], None] = print) -> LLM:
        """As a recipe says; ``say`` is told what was changed of it."""
        made = cls.__new__(cls)
        made._begin(path, recipe, adapter, say)
        return made

    def _begin(self, path: str | Path, recipe: InferenceRecipe, adapter: str | Path | None, say: Callable[[str], None] = print) -> None:
        loaded = load(path, recipe, adapter, say)
        self.offload = recipe.offload
        """Where weights are: as it was found out, where ``auto`` was asked for."""
        self.engine, self.tokenizer, self.model, self.defaults = loaded.engine, loaded.tokenizer, loaded.model, loaded.defaults
        self.kv_budget_bytes, self.device, self.ranks = loaded.kv_budget_bytes, loaded.device, loaded.ranks
        self.architecture = loaded.architecture
        self._said = f"{path}: {loaded.architecture} on {loaded.device}"
        self._keys = count()
        self._listeners: dict[str, Callable[[Delta | Result], None]] = {}
        self._in_step, self._left = False, list[str]()
        self._background: Background | None = None
        self._beginning = threading.Lock()

    def __repr__(self) -> str:
        memory = f"weights of {format_size(self.weight_bytes)}, keys and values in {format_size(self.kv_budget_bytes)}"
        return f"LLM({self._said}, {memory}{', of each rank' if self.ranks else ''})"

    def sampling(self, **settings: Any) -> Sampling:
        """What a request asks for, the model's own way of choosing where it does not say.

        Args:
            settings: fields of :class:`~fw.inference.options.Sampling`.

        Raises:
            UserError: one that is not known, or a wrong value.
        """
        return asking.sampling(self.defaults, settings)

    def _wanted(self, sampling: Sampling | None, settings: Mapping[str, Any]) -> Sampling:
        if sampling is not None and settings:
            raise UserError(f"give either sampling or {', '.join(settings)}, not both")
        return sampling or asking.sampling(self.defaults, settings)

    @property
    def adapters(self) -> list[str]:
        """Names of those that requests may ask for."""
        return self.engine.adapters.names

    @property
    def weight_bytes(self) -> int:
        """Of the model's weights in memory, of this rank."""
        return weight_bytes(self.model)

    def load_adapter(self, name: str, directory: str | Path) -> None:
        """From now on requests may ask for the adapter of a directory, of fw's or peft's, by this name, each for itself.

        Raises:
            UserError: there is none that fits, it changes more than linear layers by low rank, or the name is taken.
        """
        place = str(settled(directory, ADAPTER_CONFIG))
        self._between_steps(lambda: self.engine.adapters.load(name, place))

    def drop_adapter(self, name: str) -> None:
        """No request may ask for it any more; those that have it go on.

        Raises:
            UserError: there is none of this name.
        """
        self._between_steps(lambda: self.engine.adapters.drop(name))

    def _between_steps(self, what: Callable[[], None]) -> None:
        if self._background is None:
            what()
        else:
            self._background.call(what).result()

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; of a conversation, up to where the answer begins.

        Raises:
            UserError: it is none of these, or the tokenizer has no chat template.
        """
        return asking.encode(self.tokenizer, prompt)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | None = None,
        *,
        adapter: str | Sequence[str | None] | None = None,
        progress: bool = False,
        **settings: Any,
    ) -> list[Result]:
        """A result for each prompt, in their order. Streams that are open go on meanwhile.

        Args:
            prompts: one, or many.
            sampling: for all of them; instead of it ``settings``, its fields: ``max_tokens=100, temperature=0``.
            adapter: name of one that was loaded, or one for each prompt.
            progress: show a bar.

        Raises:
            UserError: a prompt that cannot be answered, by its number; none has been answered then. One of several that could not be
                answered to its end is among the results, with ``error``; of a single prompt that is raised as well.
        """
        wanted = self._wanted(sampling, settings)
        self._alone()
        many = _many(prompts)
        with_adapter = [adapter] * len(many) if adapter is None or isinstance(adapter, str) else list(adapter)
        if len(with_adapter) != len(many):
            raise UserError(f"adapter: {len(with_adapter)} names for {len(many)} prompts; give one for each, or one")
        keys = [f"prompt {next(self._keys)}" for _ in many]
        found: dict[str, Result] = {}
        try:
            for number, (key, prompt, name) in enumerate(zip(keys, many, with_adapter, strict=True)):
                try:
                    self._add(key, prompt, wanted, _results_in(found), name)
                except UserError as error:
                    raise UserError(f"prompt {number}: {error}" if len(many) > 1 else str(error)) from None
            with Bar(total=len(many), desc="generating", unit=" prompts", shown=progress) as bar:
                while (before := len(found)) < len(many):
                    self.step()
                    bar.update(len(found) - before)
        finally:
            self._leave(keys)
        if len(keys) == 1 and (why := found[keys[0]].error):
            raise UserError(why)
        return [found[key] for key in keys]

    def embed(self, prompts: Prompt | Sequence[Prompt], pooling: Pooling = "mean", *, adapter: str | None = None) -> list[list[float]]:
        """Hidden states of each prompt, behind the last norm, as one: ``[D]`` each.

        Args:
            pooling: their mean, or the last token's.

        Raises:
            UserError: a prompt that is too long or empty, or a model that does not show them.
        """
        self._alone()
        none, asked = Sampling(max_tokens=0, logprobs=None), [f"prompt {next(self._keys)}" for _ in _many(prompts)]
        found: dict[str, Result] = {}
        try:
            for key, prompt in zip(asked, _many(prompts), strict=True):
                self._add(key, prompt, none, _results_in(found), adapter, pooling)
            while len(found) < len(asked):
                self.step()
        finally:
            self._leave(asked)
        return [list(found[key].embedding) for key in asked]

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, adapter: str | None = None, **settings: Any
    ) -> Generator[Delta, None, None]:
        """What each step adds to the answer, as it comes; who stops listening ends it. Several may be open at once, and other methods be
        called meanwhile: they share the steps, and what comes of a step that another one made is kept until it is asked for.

        Raises:
            UserError: a prompt that cannot be answered, or ``best_of``: the best are known when all have ended, by :meth:`generate`.
        """
        self._alone()
        wanted = self._wanted(sampling, settings)
        if wanted.drawn > wanted.n:
            raise UserError(f"best_of: the best {wanted.n} of {wanted.drawn} answers are known when all have ended; generate gives them")
        key = f"prompt {next(self._keys)}"
        told: deque[Delta | Result] = deque()
        try:
            self._add(key, prompt, wanted, told.append, adapter)
            while True:
                while not told:
                    self.step()
                each = told.popleft()
                if isinstance(each, Delta):
                    yield each
                elif each.error:
                    raise UserError(each.error)
                else:
                    return
        finally:
            self._leave([key])

    def step(self) -> tuple[list[Delta], list[Result]]:
        """A step of the engine, as :meth:`fw.inference.engine.Engine.step`: for who has added requests to it. Ctrl-C waits for its end.

        Returns:
            What came of these; what came of this object's own is kept for who asked.
        """
        if not len(self.engine) and self._listeners:
            raise RuntimeError("requests are gone from the engine whose results nobody has: step by LLM.step, and not by the engine's own")
        with uninterrupted():
            self._in_step = True
            try:
                deltas, results = self.engine.step()
            except Exception as error:
                self._lost(error)
                raise
            finally:
                self._in_step = False
                self._leave(self._left)
                self._left.clear()
            own = self._listeners
            others = [delta for delta in deltas if delta.key not in own], [result for result in results if result.key not in own]
            for delta in deltas:
                if (tell := own.get(delta.key)) is not None:
                    tell(delta)
            for result in results:
                if (tell := own.pop(result.key, None)) is not None:
                    tell(result)
        return others

    def _lost(self, error: Exception) -> None:
        """How far those are that began is not known: they end, and who has them is told."""
        for key in self.engine.begun:
            result = self.engine.abort(key)
            if result is not None and (tell := self._listeners.pop(key, None)) is not None:
                tell(replace(result, error=describe(error)))

    def _add(
        self,
        key: str,
        prompt: Prompt,
        sampling: Sampling,
        tell: Callable[[Delta | Result], None],
        adapter: str | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        self.engine.add(key, self.encode(prompt), sampling, adapter=adapter, pooling=pooling)
        self._listeners[key] = tell

    def _leave(self, keys: Sequence[str]) -> None:
        """Nobody waits for these any more. Generators that are forgotten say so at any time, also amid a step, which ends with them."""
        for key in keys:
            self._listeners.pop(key, None)
            if self._in_step:
                self._left.append(key)
            else:
                self.engine.abort(key)

    async def astream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, priority: int = 0, adapter: str | None = None, **settings: Any
    ) -> AsyncGenerator[Delta | Result, None]:
        """What each step adds to the answer, as it comes, and last the result, which with ``best_of`` is all; others' requests share the
        steps. Who stops listening ends it.

        The model works in a thread of its own from the first such call on, until :meth:`close`.

        Args:
            priority: lower goes first.

        Raises:
            UserError: a prompt that cannot be answered, or a :meth:`stream` that is open.
        """
        if self._listeners:
            raise UserError("a stream is open, which makes steps of its own; read it to its end or close() it, or use astream for both")
        wanted, ids = self._wanted(sampling, settings), self.encode(prompt)
        with self._beginning:
            if self._background is None:
                self._background = Background(self.engine)
                weakref.finalize(self, self._background.end)  # its thread holds the engine, and would for ever
            background = self._background  # the one that has the request, whoever closes it meanwhile
        key, loop = f"prompt {next(self._keys)}", asyncio.get_running_loop()
        told: asyncio.Queue[Told] = asyncio.Queue()
        background.add(key, ids, wanted, lambda each: _pass_on(loop, told, each), priority, adapter)
        try:
            while True:
                each = await told.get()
                if isinstance(each, BaseException):
                    raise each
                if isinstance(each, Result) and each.error:
                    raise UserError(each.error)
                if isinstance(each, Result) or wanted.drawn == wanted.n:
                    yield each
                if isinstance(each, Result):
                    return
        finally:
            background.abort(key)

    async def agenerate(self, prompt: Prompt, sampling: Sampling | None = None, **settings: Any) -> Result:
        """The result of a prompt; others' requests share the steps. As :meth:`astream`."""
        async for each in self.astream(prompt, sampling, **settings):
            if isinstance(each, Result):
                return each
        raise AssertionError("a stream ends with its result")

    def close(self) -> None:
        """End what :meth:`astream` began, and other ranks; without these the model can be used as before."""
        if self._background is not None:
            self._background.close()
            self._background = None
        if self.ranks is not None:
            self.ranks.close()

    def _alone(self) -> None:
        if self._background is not None:
            raise UserError("astream and agenerate have the model; use these, or close() first")


def _pass_on(loop: asyncio.AbstractEventLoop, told: asyncio.Queue[Told], each: Told) -> None:
    with suppress(RuntimeError):  # the loop is closed, so that nobody listens
        loop.call_soon_threadsafe(told.put_nowait, each)


def _results_in(found: dict[str, Result]) -> Callable[[Delta | Result], None]:
    """Puts results there, by their keys."""

    def tell(each: Delta | Result) -> None:
        if isinstance(each, Result):
            found[each.key] = each

    return tell


def _many(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, of one that stands alone as well."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(item, int | Mapping) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]
