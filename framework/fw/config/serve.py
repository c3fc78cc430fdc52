"""The section ``serve``."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal

from fw.config.size import parse_size
from fw.errors import UserError

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s\[\],*]+|[a-z][a-z0-9+.-]*://\[[0-9a-f:.]+\](:\d+)?")
"""As browsers write them (RFC 6454), in small letters."""

_LEAST = {
    "replicas": 1,
    "max_adapters": 1,
    "max_queue": 0,
    "max_prompt_tokens": 1,
    "max_n": 1,
    "max_inputs": 1,
    "max_connections": 1,
    "timeout": 0.001,
    "drain": 0,
}


@dataclass
class ServeSection:
    """Who may ask a server, for how much, and what becomes of it."""

    model: str = ""
    """A model directory, an adapter's, a run directory, or org/name of the hub; of a config that `fw serve` is given."""
    adapter: str = ""
    """Directory of an adapter of the model, that is always on."""
    adapters: list[str] = field(default_factory=list)
    """Adapters that requests may ask for as their model, NAME=DIR each."""
    adapters_dir: str = ""
    """Directory within which adapters may be loaded while the server runs, by /v1/load_lora_adapter. Empty for none."""
    max_adapters: int = 64
    """Beside the model at a time; each takes its memory."""
    name: str = ""
    """By which requests ask for the model; empty for the name of its directory."""
    host: str = "127.0.0.1"
    """Address to listen at. Another than this machine's own wants API keys, or `insecure`."""
    port: int = 8000
    """To listen at; 0 for any that is free, which is printed."""
    replicas: int = 1
    """Engines, each in a process with the whole model: as many times the memory. Requests go to the one with the fewest."""
    api_keys: str = ""
    """File with a key in each line. More may be in the environment, FW_API_KEYS, with commas between them."""
    insecure: bool = False
    """Listen at any address without keys."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names that requests may ask this server by (their Host), besides localhost, addresses and `host`; '*' for all. Empty for all, but for
    a server without keys at an address of this machine's own: a page could come in by a name of its own there, so others are refused."""
    cors_origins: list[str] = field(default_factory=list)
    """Origins, like https://example.com, whose pages may ask from a browser; `*` for all. Empty for none."""
    max_queue: int = 256
    """Sequences that may wait; whoever comes then is refused at once, with 429."""
    max_body: str = "16MiB"
    """Of a request; files of batches may have 64 times as much."""
    max_prompt_tokens: int | None = None
    """Of a prompt; empty for the model's context."""
    max_n: int = 16
    """Answers to one prompt."""
    max_inputs: int = 2048
    """Prompts in one request, or texts that it wants embeddings of."""
    max_connections: int | None = None
    """At a time; whoever comes then is refused at once, with 503. Empty for as many as the system's open files allow."""
    timeout: float = 600.0
    """Seconds for a request, from its arrival to the end of its answer."""
    drain: float = 30.0
    """Seconds that running requests have to end after SIGTERM."""
    files_dir: str = ""
    """Where files of batches are kept; empty for a directory that is gone with the server."""
    files_space: str = "64GiB"
    """For all of them; whoever brings more then is refused, with 507, until some are deleted."""
    tools: Literal["auto", "none", "hermes", "llama", "mistral", "qwen3_coder", "pythonic"] = "auto"
    """How the model writes calls of functions; `auto` for what its chat template says."""
    log: Literal["json", "none"] = "json"
    """A line on stderr for each request."""
    log_prompts: bool = False
    """With prompts and answers in it, and what unexpected errors say, which may repeat them."""
    traces: str = ""
    """Where OpenTelemetry's spans are sent, like http://collector:4318/v1/traces. Empty for nowhere."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"serve.{name}: {value} is too small; the least is {least}")
        if not 0 <= self.port < 1 << 16:
            raise UserError(f"serve.port: {self.port} is no port; there are 1 to 65535, and 0 for any")
        if parse_size(self.max_body) < 1024:
            raise UserError(f"serve.max_body: {self.max_body} holds no request; give 1KiB at least")
        if parse_size(self.files_space) < 0:
            raise UserError(f"serve.files_space: {self.files_space} is less than nothing")
        if len(self.adapters) > self.max_adapters:
            raise UserError(f"serve.adapters: {len(self.adapters)} are more than serve.max_adapters, {self.max_adapters}; set that as well")
        for text in self.adapters:
            name, _, directory = text.partition("=")
            if not (name and directory):
                raise UserError(f"serve.adapters: {text}: give NAME=DIR, the name that requests ask for and the adapter's directory")
        for text in self.allowed_hosts:
            if not text or set(text) & set("/: "):
                raise UserError(
                    f"serve.allowed_hosts: '{text}' is no name; give them like models.example.com, without a port, or '*' for all"
                )
        for text in self.cors_origins:
            if not _ORIGIN.fullmatch(text):
                raise UserError(
                    f"serve.cors_origins: {text} is no origin; give them like https://example.com, without a path, or '*' for all"
                )

    @property
    def is_public(self) -> bool:
        """Whether others than this machine can reach it."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True
