"""The process of an engine: does what the server says, a step at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, NoReturn

from fw.errors import UserError, describe
from fw.inference.results import Delta, Result
from fw.launching.child import ended, joined
from fw.server.logs import trace
from fw.server.messages import Abort, Add, Begin, Done, DropAdapter, Hold, LoadAdapter, Loaded, Release, State, Stepped

if TYPE_CHECKING:
    from fw.inference.adapters import Adapter
    from fw.inference.structure import Form

_LOOK_S = 1.0


def main() -> NoReturn:
    """From beginning to end."""
    connection, _ = joined()
    ended(connection, partial(_run, connection))


def _run(connection: Connection[Any, Any]) -> None:
    begin: Begin = connection.recv()
    served = Served(begin)
    connection.send(served.loaded())
    ranks = served.llm.ranks
    heard = [connection, served.forming.ready, *(ranks.connections if ranks is not None else ())]
    while True:
        while there := wait(heard, 0 if served.busy else None):
            if connection in there:
                served.take(connection.recv(), connection)
            elif served.forming.ready in there:
                served.take_form()
            else:
                assert ranks is not None
                ranks.lost()
            if not served.busy and not wait(heard, 0):
                connection.send(served.said())  # nothing else is going to be
        connection.send(served.step())


class Served:
    """A model, and requests for it."""

    def __init__(self, begin: Begin) -> None:
        import torch

        from fw.inference.steady import sizes_on_gpu
        from fw.planning.llm import LLM
        from fw.recipe.inference import resolve_inference
        from fw.server.forming import Forming

        if begin.threads is not None:
            torch.set_num_threads(begin.threads)
        self._said: list[str] = []
        self._words = begin.words
        recipe = resolve_inference(begin.config)
        self.llm = LLM.of(begin.path, recipe, begin.adapter, self._said.append)
        for name, directory in begin.adapters:
            self.llm.load_adapter(name, directory)
        self._options = recipe.inference
        self._engine = self.llm.engine
        if self.llm.device.type == "cuda":
            self._engine.warm_up(sizes_on_gpu(recipe.inference.max_sequences))
        self.forming = Forming(self._engine.structure)
        self._kept: dict[str, Adapter] = {}
        self._refused: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._whole = True
        """Whether the last step was made."""
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
            {name: getattr(llm.offload, name) for name in ("params", "budget", "host_budget")},
        )

    def take(self, message: Any, connection: Connection[Any, Any]) -> None:
        """What the server says."""
        if isinstance(message, Add):
            self._ask(message)
        elif isinstance(message, Abort):
            self.forming.leave(message.key)
            self._engine.abort(message.key)
        elif isinstance(message, Hold):
            if message.adapter in self._engine.adapters.names:  # else whoever comes for it hears so
                self._kept[message.key] = self._engine.adapters.find(message.adapter)
        elif isinstance(message, Release):
            self._kept.pop(message.key, None)
        else:
            assert isinstance(message, LoadAdapter | DropAdapter)
            failed: str | None = None
            try:
                if isinstance(message, LoadAdapter):
                    self.llm.load_adapter(message.name, message.directory)
                else:
                    self.llm.drop_adapter(message.name)
            except Exception as error:  # whatever is in a directory: nobody else's request ends with it
                self._check_there()
                failed = describe(error)
            connection.send(Done(message.key, failed, self._engine.adapters.names))

    def take_form(self) -> None:
        """One that is made."""
        if (made := self.forming.made()) is not None:
            (add, adapter), form = made
            self._add(add, adapter, form)

    def _ask(self, add: Add) -> None:
        """Its adapter is the one of now, however long its form takes."""
        adapter = None if add.held is None else self._kept.get(add.held)
        try:
            if adapter is None and add.adapter is not None:
                adapter = self._engine.adapters.find(add.adapter)
        except UserError as error:
            self._refused[add.key] = str(error)
            return
        if add.sampling.form is not None:
            self.forming.ask(add, adapter)
        else:
            self._add(add, adapter)

    def _add(self, add: Add, adapter: Adapter | None, form: Form | Exception | None = None) -> None:
        try:
            if isinstance(form, Exception):
                raise form
            self._engine.add(add.key, add.prompt, add.sampling, add.priority, adapter, add.pooling, form)
        except UserError as error:
            self._refused[add.key] = str(error)
        except Exception as error:
            self._fail([add.key], error)

    def step(self) -> Stepped:
        """Compute. Where that fails as a whole, so do the requests that run, and those that wait go on; but not twice in a row, and not
        with other ranks, which are amid the step."""
        try:
            deltas, results = self._engine.step()
        except Exception as error:
            if not self._whole or self.llm.ranks is not None or not (begun := self._engine.begun):
                raise
            self._whole = False
            self._fail(begun, error)
            return self.said()
        self._whole = True
        self._generated += sum(delta.token is not None for delta in deltas)
        return self._stepped(deltas, results)

    def said(self) -> Stepped:
        """How it is, without a step."""
        return self._stepped()

    def _stepped(self, deltas: Sequence[Delta] = (), results: Sequence[Result] = ()) -> Stepped:
        (refused, failed), self._refused, self._failed = (self._refused, self._failed), {}, {}
        return Stepped(self._state(), deltas, results, refused, failed)

    def _fail(self, keys: Sequence[str], error: Exception) -> None:
        """These requests, and no others."""
        self._check_there()
        for key in keys:
            self._engine.abort(key)
            self._failed[key] = trace(error, self._words)

    def _check_there(self) -> None:
        """The device still computes: a CUDA context that is broken says so to whoever asks, and no request could go on."""
        if self.llm.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.llm.device)

    def _state(self) -> State:
        from fw.meter.memory import held_bytes

        now = time.monotonic()
        if now - self._looked > _LOOK_S or not self.busy:
            self._looked, self._held = now, held_bytes(self.llm.device) or 0
        scheduler = self._engine.scheduler
        return State(
            len(scheduler.running),
            len(scheduler.waiting) + len(self.forming),
            scheduler.cache.used_bytes,
            scheduler.cache.live_bytes,
            scheduler.preemptions,
            scheduler.prompt_tokens,
            scheduler.cached_tokens,
            self._generated,
            self._weight_bytes,
            self._held,
        )
