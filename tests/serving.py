"""A server as users start it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

PATIENCE_S = 60.0
KEY = "sk-of-a-test"


def until(what: Callable[[], Any], patience: float = PATIENCE_S) -> Any:
    """What it gives as soon as that is something; looked at again and again."""
    end = time.monotonic() + patience
    while not (found := what()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


_TEMPLATE = """{% if tools %}<s>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>{"name": …, "arguments": …}</tool_call>.</s>{% endif %}
{%- for message in messages %}<s>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{% for call in message.tool_calls %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}</s>{% endfor %}
{%- if add_generation_prompt %}<s>assistant
{% endif %}"""


def make_model(place: Path, seed: int = 0, ends: bool = True, **shape: Any) -> Path:
    """A Llama that has learnt nothing, in a directory; its tokens are the bytes and three special ones; it knows an end, or goes on."""
    import torch
    from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    from fw.tokenizer import Tokenizer

    special = ["<unk>", "<s>", "</s>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: n for n, token in enumerate([*special, *letters])}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 2048, "vocab_size": len(special) + len(letters), **shape}
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.3, bos_token_id=1, eos_token_id=2 if ends else None))
    model.save_pretrained(place)
    Tokenizer.from_backend(backend, bos_token="<s>", eos_token="</s>" if ends else None, chat_template=_TEMPLATE).save(place)
    return place


class Server:
    """``fw serve MODEL words…``; ends with the ``with`` block.

    Args:
        python: that runs it; this one's where none is given.

    Attributes:
        said: its stdout, by lines.
        log: its log, by lines.
    """

    def __init__(
        self, model: str | Path, *words: str, environment: Mapping[str, str] | None = None, ready: bool = True, python: Path | None = None
    ) -> None:
        words = (str(python or sys.executable), "-m", "fw", "serve", str(model), "--port", "0", *words)
        kept = {k: v for k, v in os.environ.items() if k not in ("FW_DEBUG", "FW_API_KEYS", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**kept, "PYTHONUNBUFFERED": "1", **(environment or {})}
        )
        self.said: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            for stream, lines in ((self.process.stdout, self.said), (self.process.stderr, self.errors))
        ]
        for reader in self._readers:
            reader.start()
        try:
            self.url = until(self._address)
            if ready:
                until(self._ready)
        except BaseException:
            self.process.kill()
            raise

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        lines.extend(iter(stream.readline, ""))

    def _address(self) -> str | None:
        assert self.process.poll() is None, "".join(self.errors)
        found = re.search(r"at (http://\S+)", "".join(self.said))
        return found[1] if found else None

    def _ready(self) -> bool:
        assert self.process.poll() is None, "".join(self.errors)
        try:
            return httpx.get(f"{self.url}/ready").status_code == 200
        except httpx.TransportError:  # it has ended, perhaps
            return False

    @property
    def log(self) -> list[dict[str, Any]]:
        """What it has logged."""
        return [json.loads(line) for line in list(self.errors) if line.startswith("{")]

    def client(self, **more: Any) -> httpx.Client:
        """Of plain HTTP."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **more)

    def openai(self, key: str = "none", **more: Any) -> openai.OpenAI:
        """OpenAI's own client, which does not try again by itself."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S, **more)

    def stats(self) -> dict[str, Any]:
        """Of the page."""
        found: dict[str, Any] = httpx.get(f"{self.url}/stats", headers={"Authorization": f"Bearer {KEY}"}).json()
        return found

    def idle(self) -> dict[str, Any]:
        """Waits until nobody has a request; everything must be free then."""
        found: dict[str, Any] = until(lambda: (s := self.stats())["running"] == s["waiting"] == s["kv_used_bytes"] == 0 and s)
        return found

    def engine(self) -> int:
        """The process of its engine."""
        (line,) = until(lambda: [line for line in self.log if line["event"] == "ready"])
        return int(line["engines"][0])

    def raw(self) -> socket.socket:
        """A connection to it."""
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), timeout=PATIENCE_S)

    def ended(self, patience: float = PATIENCE_S) -> int:
        """Its exit code, when it has ended; all it has said is there."""
        code = self.process.wait(patience)
        for reader in self._readers:
            reader.join(patience)
        return code

    def terminate(self) -> None:
        """As a supervisor asks."""
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def serving(model: str | Path, *words: str, **more: Any) -> Iterator[Server]:
    """A server that must end well when it is asked to."""
    server = Server(model, *words, **more)
    try:
        yield server
        if server.process.poll() is None:
            server.terminate()
            assert server.ended() == 0, "".join(server.errors[-20:])
    finally:
        server.process.kill()
