"""The process of an engine: does what the server says, a step at a time."""

from __future__ import annotations

import gc
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from fw.errors import UserError
from fw.launching.child import ended, joined
from fw.server.messages import Abort, Add, Begin, Done, DropAdapter, LoadAdapter, Loaded, State, Stepped

_LOOK_S = 1.0


def main() -> NoReturn:
    """From beginning to end."""
    connection, _ = joined()
    ended(connection, partial(_run, connection))


def _run(connection: Connection[Any, Any]) -> None:
    begin: Begin = connection.recv()
    served = Served(begin)
    connection.send(served.loaded())
    while True:
        while not served.busy or connection.poll():
            served.take(connection.recv(), connection)
            if not served.busy and not connection.poll():
                connection.send(served.said())  # nothing else is going to be
        connection.send(served.step())


class Served:
    """A model, and requests for it."""

    def __init__(self, begin: Begin) -> None:
        import torch

        from fw.inference.steady import sizes_on_gpu
        from fw.planning.llm import LLM
        from fw.recipe.inference import resolve_inference

        if begin.threads is not None:
            torch.set_num_threads(begin.threads)
        self._said: list[str] = []
        recipe = resolve_inference(begin.config)
        self.llm = LLM.of(begin.path, recipe, begin.adapter, self._said.append)
        for name, directory in begin.adapters:
            self.llm.load_adapter(name, directory)
        self._options = recipe.inference
        self._engine = self.llm.engine
        if self.llm.device.type == "cuda":
            self._engine.warm_up(sizes_on_gpu(recipe.inference.max_sequences))
        self._refused: dict[str, str] = {}
        self._generated, self._looked, self._held = 0, 0.0, 0
        self._weight_bytes = self.llm.weight_bytes
        # What is loaded stays: looking through half a million objects for garbage would hold up a step.
        gc.collect()
        gc.freeze()

    @property
    def busy(self) -> bool:
        """Whether there is something to compute."""
        return len(self._engine) > 0

    def loaded(self) -> Loaded:
        """What it is."""
        llm, engine = self.llm, self._engine
        return Loaded(
            llm.tokenizer.place,
            llm.defaults,
            engine.context,
            engine.vocab_size,
            engine.ends,
            str(llm.device),
            self._options.max_sequences,
            llm.kv_budget_bytes,
            llm.architecture,
            llm.model.shows_hidden_states,
            engine.adapters.names,
            self._said,
            self._state(),
        )

    def take(self, message: Any, connection: Connection[Any, Any]) -> None:
        """What the server says."""
        if isinstance(message, Add):
            try:
                self._engine.add(message.key, message.prompt, message.sampling, message.priority, message.adapter, message.pooling)
            except UserError as error:
                self._refused[message.key] = str(error)
        elif isinstance(message, Abort):
            self._engine.abort(message.key)
        else:
            assert isinstance(message, LoadAdapter | DropAdapter)
            failed: str | None = None
            try:
                if isinstance(message, LoadAdapter):
                    self.llm.load_adapter(message.name, message.directory)
                else:
                    self.llm.drop_adapter(message.name)
            except UserError as error:
                failed = str(error)
            connection.send(Done(message.key, failed, self._engine.adapters.names))

    def step(self) -> Stepped:
        """Compute."""
        deltas, results = self._engine.step()
        self._generated += sum(delta.token is not None for delta in deltas)
        refused, self._refused = self._refused, {}
        return Stepped(self._state(), deltas, results, refused)

    def said(self) -> Stepped:
        """How it is, without a step."""
        refused, self._refused = self._refused, {}
        return Stepped(self._state(), refused=refused)

    def _state(self) -> State:
        from fw.meter.memory import held_bytes

        now = time.monotonic()
        if now - self._looked > _LOOK_S or not self.busy:
            self._looked, self._held = now, held_bytes(self.llm.device) or 0
        scheduler = self._engine.scheduler
        return State(
            len(scheduler.running),
            len(scheduler.waiting),
            scheduler.cache.used_bytes,
            scheduler.cache.live_bytes,
            scheduler.preemptions,
            scheduler.prompt_tokens,
            scheduler.cached_tokens,
            self._generated,
            self._weight_bytes,
            self._held,
        )
