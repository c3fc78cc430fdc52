"""`fw serve` under a crowd: clients that go away, requests that are wrong, more than there is room for, and nothing lost in the end.

    tools/bench serve --soak [--requests 5000] [--concurrency 64] [--seed 0]

A small model with little room for keys and values and a short queue, so that sequences are preempted and requests refused. A third of
the requests are left at a random moment: half sent, before the answer, or within a stream. A tenth are wrong in some way. In the end,
with nobody there, every block of keys and values must be free, no request running or waiting, no answer of 5xx given, and no process
larger than after the first parts (RssAnon of server and engine). Leaves with 1 where something of this is not so, where a request got no
whole answer in time, or where refusals by the full queue took too long: those of wrong requests, which no queue sees, are not among these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from http_client import Closed, Connection
from serving import Server, make_model

TEXT = (json.__doc__ or "") + (asyncio.gather.__doc__ or "") + "Ünïcödé, 漢字 and 🙂. "
PARTS, WARM = 10, 3
"""After each part memory is looked at, with nobody there; after the first ones rooms are filled, and code is loaded."""
PATIENCE_S = 120.0
FULL = 429
"""Status of what the full queue refuses."""
MALFORMED: list[tuple[Any, ...]] = [
    (400, "POST", "/v1/completions", b"{"),
    (400, "POST", "/v1/completions", b"[" * 5000),
    (400, "POST", "/v1/completions", {"prompt": "x", "max_token": 3}),
    (400, "POST", "/v1/completions", {"prompt": [1, 10**9]}),
    (400, "POST", "/v1/completions", {"prompt": "x" * 5000, "max_tokens": 1}),
    (400, "POST", "/v1/chat/completions", {"messages": [{"role": "nobody", "content": 3}]}),
    (404, "POST", "/v1/completions", {"prompt": "x", "model": "another"}),
    (404, "GET", "/v1/nothing"),
    (405, "GET", "/v1/completions"),
    (413, "POST", "/v1/completions", {"prompt": "x" * 70_000}),
]
"""What is wrong, and the status that says so."""
OPTIONS = (
    "inference.dtype=fp32",
    "inference.max_sequences=16",
    "inference.max_context=512",
    "inference.kv_budget=384KiB",
    "serve.max_queue=24",
    "serve.max_body=64KiB",
    "serve.log=none",
)


class Crowd:
    """Clients of a server.

    Attributes:
        outcomes: how requests ended: a status, or ``left`` by the client.
        refusals: seconds to the answer of each that was refused, by what with.
        stuck: requests that had no whole answer in time.
        wrong: what else should not have happened.
    """

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.chance = server, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.refusals: dict[int, list[float]] = {}
        self.stuck: list[str] = []
        self.wrong: list[str] = []

    async def request(self, connection: Connection) -> None:
        """One of any kind."""
        lot = self.chance.random()
        words: list[Any] = []
        if lot < 0.1:
            status, *words = self.chance.choice(MALFORMED)
            work = self._whole(connection, (status,), *words)
        elif lot < 0.1 + 1 / 3:
            work = self._left(connection)
        else:
            words = ["POST", *self._asked()]
            work = self._whole(connection, (200, 429), *words)
        try:
            await asyncio.wait_for(work, PATIENCE_S)
        except asyncio.TimeoutError:
            connection.close()
            self.stuck.append(str(words or "one that was to be left"))
        except (Closed, ConnectionError) as error:
            self.wrong.append(f"{type(error).__name__} {error} of {words}")

    def _asked(self) -> tuple[str, dict[str, Any]]:
        chance = self.chance
        begin = chance.choice([0, 0, chance.randrange(len(TEXT) // 2)])
        text = TEXT[begin : begin + chance.randint(1, 250)]
        common = {
            "max_tokens": chance.randint(1, 60),
            "temperature": chance.choice([0, 1]),
            "stream": chance.random() < 0.5,
            "ignore_eos": chance.random() < 0.5,
            "n": chance.choice([1, 1, 1, 2]),
            "stop": chance.choice([None, None, "e"]),
        }
        kind = chance.random()
        if kind < 0.5:
            return "/v1/completions", {**common, "prompt": text, "logprobs": chance.choice([None, None, 2])}
        if kind < 0.85:
            return "/v1/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}
        if kind < 0.95:
            return "/v1/embeddings", {"input": text}
        return "/tokenize", {"prompt": text}

    async def _whole(self, connection: Connection, right: tuple[int, ...], method: str, path: str, body: Any = None) -> None:
        begin = time.perf_counter()
        pieces = await connection.ask(method, path, body)
        self._ended(connection.status, path, time.perf_counter() - begin, right)
        content = b"".join([piece async for piece in pieces])
        if connection.status == 200 and body.get("stream") and not content.endswith(b"data: [DONE]\n\n"):
            self.wrong.append(f"a stream ends with {content[-200:]!r}")
        if connection.status == 429:
            await asyncio.sleep(self.chance.random())  # as Retry-After asks for, more or less

    def _ended(self, status: int, path: str, seconds: float, right: tuple[int, ...]) -> None:
        self.outcomes[str(status)] += 1
        if status not in right:
            self.wrong.append(f"{path}: {status} instead of {right}")
        if status >= 400:
            self.refusals.setdefault(status, []).append(seconds)

    async def _left(self, connection: Connection) -> None:
        """At some moment; the connection is closed then."""
        path, body = self._asked()
        try:
            moment = self.chance.choice(["half sent", "waiting", "within"])
            if moment == "half sent":
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"
                await connection.send(head.encode() + b"{")
            elif moment == "waiting":
                with suppress(asyncio.TimeoutError):
                    asked = connection.ask("POST", path, {**body, "max_tokens": 200} if "max_tokens" in body else body)
                    await asyncio.wait_for(asked, self.chance.choice([0.001, 0.01, 0.1]))
            else:
                pieces = await connection.ask("POST", "/v1/completions", {"prompt": TEXT[:200], "max_tokens": 200, "stream": True})
                for _ in range(self.chance.randint(0, 10)):
                    await anext(pieces, None)
        finally:
            connection.close()
        self.outcomes["left"] += 1


async def crowd_of(server: Server, options: argparse.Namespace) -> tuple[Crowd, dict[str, list[int]]]:
    """Send all of them; the clients, and bytes of memory of each process after each part."""
    crowd = Crowd(server, options.seed)
    memory: dict[str, list[int]] = {}
    ends = [options.requests * part // PARTS for part in range(PARTS + 1)]
    with tqdm(total=options.requests, unit="request", disable=None) as bar:
        for begin, end in pairwise(ends):
            left = iter(range(begin, end))

            async def client(left: Any = left) -> None:
                connection = Connection(server.url)
                await asyncio.sleep(crowd.chance.random())  # the pauses are ours: nobody's clients all begin within a millisecond
                for _ in left:
                    await crowd.request(connection)
                    bar.update()
                connection.close()

            await asyncio.gather(*(client() for _ in range(options.concurrency)))
            server.idle()
            for name, pid in {"server": server.process.pid, "engine": engine_of(server)}.items():
                memory.setdefault(name, []).append(anonymous(pid))
    return crowd, memory


def engine_of(server: Server) -> int:
    """The one child of it that computes; another makes the plan."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return max((int(child) for child in children), key=anonymous)


def anonymous(pid: int) -> int:
    """Bytes of memory that a process has for itself."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def percentile(values: list[float], part: float) -> float:
    """The smallest value that so many are not above."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main(words: list[str] | None = None) -> int:
    """Soak, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--growth", type=float, default=3.0, help="percent that a process may grow after the first parts")
    parser.add_argument("--patience", type=float, default=0.1, help="seconds that 99 of 100 refusals by the full queue may take")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place) / "model")
        server = Server(model, *OPTIONS)
        try:
            begin = time.perf_counter()
            crowd, memory = asyncio.run(crowd_of(server, options))
            seconds = time.perf_counter() - begin
            stats = server.idle()
            server.terminate()
            code = server.ended()
        finally:
            server.process.kill()
    wrong = [f"{count} × {text}" for text, count in Counter(crowd.wrong).items()]
    print(f"{options.requests:,} requests, {options.concurrency} at once, in {seconds:.0f} s")
    print("ended with   " + ", ".join(f"{outcome}: {count:,}" for outcome, count in sorted(crowd.outcomes.items())))
    print(f"preemptions  {stats['preemptions_total']:,}; aborted by clients {stats['aborted_total']:,}")
    used, budget = stats["kv_used_bytes"], stats["kv_budget_bytes"]
    print(f"keys, values {budget - used:,} of {budget:,} bytes are free; running {stats['running']}, waiting {stats['waiting']}")
    for status, times in sorted(crowd.refusals.items()):
        print(f"refused {status}  {len(times):,}: median {percentile(times, 0.5) * 1e3:.1f} ms, p99 {percentile(times, 0.99) * 1e3:.1f} ms")
    print(f"stuck        {len(crowd.stuck):,} without a whole answer after {PATIENCE_S:g} s")
    wrong += [f"stuck: {text[:300]}" for text in crowd.stuck]
    if FULL not in crowd.refusals:
        wrong.append("the queue was never full; ask with a larger --concurrency or more --requests")
    elif (p99 := percentile(crowd.refusals[FULL], 0.99)) > options.patience:
        wrong.append(f"p99 of refusals by the full queue is {p99 * 1e3:.0f} ms")
    for name, sizes in memory.items():
        growth = 100 * (sizes[-1] / sizes[WARM - 1] - 1)
        print(f"{name:12} {' '.join(f'{size / 2**20:.1f}' for size in sizes)} MiB ({growth:+.1f} % after {WARM} of {PARTS} parts)")
        if growth > options.growth:
            wrong.append(f"the {name} has grown by {growth:.1f} %")
    if code:
        wrong.append(f"the server has ended with {code}")
    for each in wrong:
        print(f"WRONG: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
