"""What the server and an engine say to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fw.config import Config
from fw.inference.options import Sampling
from fw.inference.results import Delta, Pooling, Result


@dataclass(frozen=True)
class Begin:
    """The first word to an engine.

    Attributes:
        threads: that it computes with on the CPU; None for all there are.
        words: whether what it says of failures may repeat what requests say.
    """

    path: str
    config: Config
    adapter: str | None
    adapters: Sequence[tuple[str, str]]
    threads: int | None = None
    words: bool = False


@dataclass(frozen=True)
class Add:
    """A request, as :meth:`fw.inference.engine.Engine.add` takes it.

    Attributes:
        held: key of a :class:`Hold`, whose adapter it has; None for the adapter that is loaded now.
    """

    key: str
    prompt: Sequence[int]
    sampling: Sampling
    priority: int = 0
    adapter: str | None = None
    pooling: Pooling | None = None
    held: str | None = None


@dataclass(frozen=True)
class Abort:
    """Of a request; nothing is said of it any more."""

    key: str


@dataclass(frozen=True)
class LoadAdapter:
    """To be answered by :class:`Done`."""

    key: str
    name: str
    directory: str


@dataclass(frozen=True)
class DropAdapter:
    """Likewise."""

    key: str
    name: str


@dataclass(frozen=True)
class Hold:
    """An adapter by its name, for requests that come later: they have it even if it is dropped before."""

    key: str
    adapter: str


@dataclass(frozen=True)
class Release:
    """Of what is held by this key: no more requests come for it."""

    key: str


@dataclass(frozen=True)
class State:
    """Of an engine.

    Attributes:
        kv_used_bytes: that sequences take now, without what is kept for the next ones.
        weight_bytes, held_bytes: of parameters; that the process, or its GPU, has taken. Looked at once in a while.
    """

    running: int = 0
    waiting: int = 0
    kv_used_bytes: int = 0
    kv_live_bytes: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    weight_bytes: int = 0
    held_bytes: int = 0


@dataclass(frozen=True)
class Loaded:
    """An engine is ready.

    Attributes:
        tokenizer: its directory.
        architecture: as config.json names it; empty where it does not.
        shows_hidden_states: so that there are embeddings.
        offload: of where weights are what ``offload.params: auto`` leaves to be found out; as attributes of its policy.
    """

    tokenizer: str
    defaults: Sampling
    context: int
    vocab_size: int
    ends: frozenset[int]
    device: str
    max_sequences: int
    kv_budget_bytes: int
    architecture: str
    shows_hidden_states: bool
    adapters: Sequence[str]
    said: Sequence[str]
    state: State
    offload: Mapping[str, Any]


@dataclass(frozen=True)
class Stepped:
    """What a step has added, by the requests' keys; what was refused, and why; what failed, with a traceback; and how the engine is."""

    state: State
    deltas: Sequence[Delta] = ()
    results: Sequence[Result] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """An adapter is loaded or dropped, or why not; and which there are."""

    key: str
    error: str | None
    adapters: Sequence[str]
