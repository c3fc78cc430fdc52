"""What a server must bear: strangers, too much, clients that go away or do not read, and its own end."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from conftest import fw as run_fw
from fw.server.api import Api
from fw.server.engines import Engines
from fw.server.errors import ApiError
from serving import KEY, Server, serving, until

BUSY = {"max_tokens": 1900, "temperature": 0, "ignore_eos": True}


def _open(server, path="/v1/completions", headers=(), **body):
    """A request on a connection of its own, which nobody reads yet."""
    data = json.dumps(body).encode()
    sock = server.raw()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(data)}", *headers]
    sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
    return sock


def _running(server, count):
    until(lambda: (s := server.stats())["running"] + s["waiting"] == count)


@pytest.fixture(scope="module")
def small(directory):
    """Two sequences at once, one may wait."""
    with serving(directory, "inference.max_sequences=2", "--max-queue", "1") as made:
        yield made


def test_keys(directory, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\n{KEY}\n\nsecond\n")
    with serving(directory, "--api-keys", str(keys), "serve.max_body=2KiB", environment={"FW_API_KEYS": "third, fourth"}) as server:
        with server.client() as client:
            for path in ("/health", "/ready", "/version", "/"):
                assert client.get(path).status_code == 200
            for path in ("/v1/models", "/metrics", "/stats", "/openapi.json"):
                for given in (None, "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer", "Bearer é".encode("latin-1")):
                    found = client.get(path, headers={} if given is None else {"Authorization": given})
                    assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
                    assert found.json()["error"]["code"] == "invalid_api_key"
                for key in (KEY, "second", "third", "fourth"):
                    assert client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code == 200
            # A body is not read of who has no key.
            assert client.post("/v1/completions", json={"prompt": "x" * 3000}).status_code == 401
            for content in (b'{"prompt": "' + b"x" * 3000 + b'"}', iter([b'{"prompt": "', b"x" * 3000, b'"}'])):  # by length, and in pieces
                found = client.post(
                    "/v1/completions", content=content, headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
                )
                assert found.status_code == 413 and "2048 bytes" in found.json()["error"]["message"]
            assert client.get("/health").status_code == 200
        assert KEY not in "".join(server.errors)


def test_whoever_sends_too_much_hears_so_all_the_same(small, size=20 << 20):
    """Even where all of it is sent before anything is read; a connection that is closed amid it would take the answer along."""
    with closing(small.raw()) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        sock.sendall(head.encode())
        for _ in range(size >> 20):
            sock.sendall(b" " * (1 << 20))
        answer = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert answer.startswith(b"HTTP/1.1 413 ") and b"larger than the 16777216 bytes" in answer


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.com"])
def test_no_public_address_without_keys(directory, host):
    found = run_fw("serve", str(directory), "--host", host)
    assert found.code == 2 and "API keys" in found.err and "insecure" in found.err


def test_what_cannot_be_served(directory, tmp_path):
    assert "no such directory" in run_fw("serve", str(tmp_path / "none")).err
    assert "serve.bogus" in run_fw("serve", str(directory), "serve.bogus=1").err
    with closing(__import__("socket").socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = run_fw("serve", str(directory), "--port", str(taken.getsockname()[1]))
        assert found.code == 2 and "cannot listen" in found.err


def test_nothing_is_answered_before_the_model_is_there(directory):
    with serving(directory, ready=False) as server, server.client() as client:
        first = client.get("/ready")
        if first.status_code == 503:  # else it was quicker than we
            assert first.json()["status"] == "loading"
            assert client.get("/health").status_code == 200
        found = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert found.status_code in (200, 503) and (found.status_code == 200 or found.headers["retry-after"])
        until(lambda: client.get("/ready").status_code == 200)
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_an_adapter_is_not_missing_while_the_model_is_loaded():
    """Nobody knows of it yet: a client is to ask again, not to give up."""
    engines = Engines(SimpleNamespace(name="tiny"), SimpleNamespace(begin=0.0, children=[]))
    api = Api(SimpleNamespace(name="tiny"), engines)
    with pytest.raises(ApiError, match="is being loaded") as found:
        api.adapter("mine")
    assert found.value.status == 503 and found.value.retry_after
    engines.condition, engines._engines, engines.tokenizer = "ready", [SimpleNamespace(loaded=object())], object()
    with pytest.raises(ApiError, match="'mine' does not exist; there are: tiny") as found:
        api.adapter("mine")
    assert found.value.status == 404


def test_a_full_queue_refuses_at_once(small):
    held = [_open(small, prompt=f"{n}", **BUSY) for n in range(3)]
    _running(small, 3)
    with small.client() as client:
        for stream in (False, True):
            found = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": stream})
            assert found.status_code == 429 and int(found.headers["retry-after"]) >= 1 and found.json()["error"]["code"] == "queue_full"
        assert client.get("/health").status_code == 200
        # Several at once are taken together, or not.
        held.pop().close()
        _running(small, 2)
        assert client.post("/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 1}).status_code == 429
        for sock in held:
            sock.close()
        small.idle()
        assert client.post("/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["waiting", "prompt", "answer", "at once"])
def test_a_client_that_goes_takes_its_request_with_it(small, stream, when):
    """Held: two that run, where one is to wait."""
    held = [_open(small, prompt=f"{n}", **BUSY) for n in range(2 if when == "waiting" else 0)]
    if held:
        _running(small, 2)
    before = small.stats()["aborted_total"]
    sock = _open(small, prompt="z" * (1500 if when == "prompt" else 5), stream=stream, **(BUSY | {"max_tokens": 500}))
    if when == "waiting":
        until(lambda: small.stats()["waiting"] == 1)
    elif when == "answer":
        until(lambda: small.stats()["running"] == 1)
        if stream:
            sock.recv(10)
    sock.close()
    until(lambda: small.stats()["running"] + small.stats()["waiting"] == len(held))
    assert small.stats()["aborted_total"] - before in ((0, 1) if when == "at once" else (1,))
    for other in held:
        other.close()
    small.idle()


def test_who_does_not_read_stalls_nobody(small):
    sock = _open(small, prompt=["a"] * 1, stream=True, logprobs=5, n=1, **BUSY)
    sock.setsockopt(__import__("socket").SOL_SOCKET, __import__("socket").SO_RCVBUF, 1)
    with small.client() as client:
        for n in range(5):
            found = client.post("/v1/completions", json={"prompt": f"n{n}", "max_tokens": 20, "temperature": 0, "ignore_eos": True})
            assert found.status_code == 200 and found.json()["usage"]["completion_tokens"] == 20
    sock.close()
    small.idle()


def test_an_engine_that_does_not_listen_stalls_nobody(directory):
    """As within a long step: prompts for it are more than a pipe holds, and the server answers others all the same."""
    prompts = [[*range(3, 250), *([7] * 1700), n] for n in range(3, 19)]
    asked = {"prompt": prompts, "max_tokens": 1, "ignore_eos": True, "stream": True}
    with serving(directory, "inference.max_sequences=64", "--max-queue", "64") as server, server.client() as client:
        os.kill(server.engine(), signal.SIGSTOP)
        try:
            sockets = [_open(server, headers=["Connection: close"], **asked) for _ in range(8)]

            def refused():
                assert client.get("/health").status_code == 200
                with suppress(httpx.ReadTimeout):  # there was room, since not all of the others had been read
                    return client.post("/v1/completions", json={"prompt": "x"}, timeout=1).status_code == 429
                return False

            until(refused)
        finally:
            os.kill(server.engine(), signal.SIGCONT)
        for sock in sockets:
            answer = sock.makefile("rb").read().decode()
            assert answer.startswith("HTTP/1.1 200") and answer.count('"finish_reason":"length"') == len(prompts), answer[-500:]
            sock.close()
        server.idle()


def test_time_is_limited(directory):
    with serving(directory, "--timeout", "0.5") as server, server.client() as client:
        found = client.post("/v1/completions", json={"prompt": "x", "n": 8, **BUSY})
        assert found.status_code == 408 and found.json()["error"]["code"] == "timeout"
        assert found.headers["x-should-retry"] == "false", "it would take as long again"
        text = client.post("/v1/completions", json={"prompt": "x", "n": 8, "stream": True, **BUSY}).text
        *_, last, done, empty = text.split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout" and (done, empty) == ("data: [DONE]", "")
        server.idle()


def test_sigterm_lets_requests_end(directory):
    with serving(directory, "--drain", "60") as server, server.client() as client:
        sock = _open(server, prompt="x", stream=True, **BUSY)
        _running(server, 1)
        os.kill(server.engine(), signal.SIGTERM)  # as systemd does, which tells all processes of a service
        server.terminate()
        until(lambda: client.get("/ready").status_code == 503)
        assert client.get("/ready").json()["status"] == "draining" and client.get("/health").status_code == 200
        found = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert found.status_code == 503 and found.json()["error"]["code"] == "draining"
        with sock.makefile("rb") as answer:
            text = answer.read().decode()
        assert '"finish_reason":"length"' in text and "data: [DONE]" in text
        assert server.ended() == 0


def test_sigterm_tells_the_rest(directory):
    with serving(directory, "--drain", "0.2", "inference.max_sequences=1") as server:
        sockets = [_open(server, prompt="x", stream=stream, **BUSY) for stream in (True, False, False)]
        _running(server, 3)
        server.terminate()
        texts = [sock.makefile("rb").read().decode() for sock in sockets]
        assert server.ended() == 0
        assert all('"code":"draining"' in text.replace(": ", ":") for text in texts)
        assert [" 200 " in text.splitlines()[0] for text in texts] == [True, False, False]
        assert all("503" in text.splitlines()[0] for text in texts[1:])


def test_sigterm_before_there_is_a_server(directory, tmp_path):
    children = "open(f'/proc/self/task/{os.getpid()}/children').read()"
    (tmp_path / "uvicorn.py").write_text(f"import os, signal\nprint({children}, flush=True)\nos.kill(os.getpid(), signal.SIGTERM)\n")
    # Another hash seed: a process that begins as any does, whose one child is the engine.
    done = run_fw("serve", str(directory), "--port", "0", env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONHASHSEED": "1"}).ok()
    (engine,) = done.out.split()
    assert not Path(f"/proc/{engine}").exists()


def test_an_engine_that_is_killed_ends_the_server(directory):
    server = Server(directory)
    try:
        sockets = [_open(server, prompt="x", stream=stream, **BUSY) for stream in (True, False)]
        _running(server, 2)
        os.kill(server.engine(), signal.SIGKILL)
        texts = [sock.makefile("rb").read().decode() for sock in sockets]
        assert all("engine_ended" in text for text in texts) and " 500 " in texts[1].splitlines()[0]
        assert server.ended() == 1
        assert "SIGKILL" in server.errors[-1]
    finally:
        server.process.kill()


def test_a_rank_that_is_killed_ends_the_server(directory):
    """Also while nobody asks for anything: the next request would only fail."""
    server = Server(directory, "inference.tensor=2")
    try:
        engine = server.engine()
        *_, rank = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()  # before it, what starts Python warm here
        os.kill(int(rank), signal.SIGKILL)
        assert server.ended() == 1
        assert any("rank 1, which computes a part of every layer, was killed by SIGKILL" in line for line in server.errors)
    finally:
        server.process.kill()


def test_a_server_that_is_killed_leaves_no_engine(directory):
    server = Server(directory)
    engine = server.engine()
    server.process.kill()
    until(lambda: not Path(f"/proc/{engine}").exists() or "zombie" in Path(f"/proc/{engine}/status").read_text())


def test_one_wrong_request_harms_no_other(small):
    sock = _open(small, prompt="x", stream=True, **BUSY)
    _running(small, 1)
    with small.client() as client:
        deep = "[" * 5000 + "]" * 5000
        for body in (
            b"",
            b"{",
            b"[]",
            b"null",
            b'"x"',
            deep.encode(),
            b"\xff\xfe",
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "x", "seed": 1e400}',
        ):
            found = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert found.status_code == 400 and found.json()["error"]["message"], body
        assert client.post("/v1/completions", data={"prompt": "x"}).status_code == 400
        assert client.get("/v1/completions").status_code == 405 and client.get("/v1/none").status_code == 404
        assert client.get("/v1/completions").json()["error"]["type"] == "invalid_request_error"
        schema = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
        assert client.post("/v1/completions", json={"prompt": "x", "json_schema": schema}).status_code == 400
    assert small.stats()["running"] == 1
    sock.close()
    small.idle()


def test_the_log_has_requests_and_no_words_of_theirs(directory):
    with serving(directory) as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": "secret", "max_tokens": 3, "temperature": 0}, headers={"X-Request-Id": "mine"})
        found = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "secret"}], "bogus": 1})
        (line,) = until(lambda: [one for one in server.log if one.get("id") == "mine"])
        assert (line["status"], line["path"], line["prompt_tokens"], line["completion_tokens"]) == (200, "/v1/completions", 6, 3)
        (wrong,) = until(lambda: [one for one in server.log if one.get("id") == found.headers["x-request-id"]])
        assert wrong["status"] == 400
        assert "secret" not in "".join(server.errors)
    with serving(directory, "serve.log_prompts=true") as server, server.client() as client:
        client.post("/v1/completions", json={"prompt": "secret", "max_tokens": 3})
        assert until(lambda: [one for one in server.log if one.get("prompt") == "secret"])


def test_other_origins(directory):
    asked = {"Origin": "https://one.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serving(directory, "serve.cors_origins=[https://one.example]") as server, server.client() as client:
        found = client.options("/v1/completions", headers=asked)
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "https://one.example"
        assert client.options("/v1/completions", headers=asked | {"Origin": "https://other.example"}).status_code == 400
        # A page of another origin can send a form without asking; it is not taken for JSON.
        assert client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": "text/plain"}).status_code == 400


def test_no_other_origin_unless_named(small):
    with small.client() as client:
        found = client.options("/v1/completions", headers={"Origin": "https://one.example", "Access-Control-Request-Method": "POST"})
        assert "access-control-allow-origin" not in found.headers
        page = client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"] and "<script src" not in page.text


def test_adapters_come_from_one_directory_only(directory, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    inside, outside = tmp_path / "adapters", tmp_path / "outside"
    for place in (inside / "one", outside):
        model = AutoModelForCausalLM.from_pretrained(directory)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        adapted.save_pretrained(place)
    (inside / "link").symlink_to(outside)
    for name in ("latest", "checkpoints/latest"):
        (inside / name.replace("/", "-") / name).parent.mkdir(parents=True)
        (inside / name.replace("/", "-") / name).symlink_to(outside)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copytree(inside / "one", inside / name)
        (inside / name / name).unlink()
        (inside / name / name).symlink_to(outside / name)
    shutil.copytree(inside / "one", inside / "listed")
    (inside / "listed" / "adapter_model.safetensors").unlink()
    listed = {"weight_map": {"x": "../../outside/adapter_model.safetensors"}}
    (inside / "listed" / "adapter_model.safetensors.index.json").write_text(json.dumps(listed))
    (inside / "run" / "checkpoints").mkdir(parents=True)
    (inside / "run" / "checkpoints" / "latest").symlink_to(inside / "one")
    options = "--adapters-dir", str(inside), "serve.max_adapters=1", "inference.dtype=fp32"
    with serving(directory, *options) as server, server.client() as client:

        def load(name, path):
            return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})

        def text(name):
            found = client.post("/v1/completions", json={"model": name, "prompt": "once", "max_tokens": 20, "temperature": 0})
            return found.json()["choices"][0]["text"] if found.status_code == 200 else found.status_code

        for path in ("../outside", str(outside), "link", ".", "none", "one/../../outside", "x\0y", "a" * 4000):
            assert load("bad", path).status_code == 404, path
        for path in ("latest", "checkpoints-latest", "adapter_config.json", "adapter_model.safetensors"):
            assert load("bad", path).status_code == 404, path
        refused = load("bad", "listed")
        assert refused.status_code == 400 and "no file beside it" in refused.json()["error"]["message"]
        assert load("run", "run").status_code == 200
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "run"}).status_code == 200
        assert load(directory.name, "one").status_code == 400 and load("../x", "one").status_code == 400
        plain = text(directory.name)
        assert load("one", "one").status_code == 200 and load("one", "one").status_code == 400
        assert text("one") not in (plain, 404)
        assert "serve.max_adapters" in load("another", "one").json()["error"]["message"]
        assert {card["id"] for card in client.get("/v1/models").json()["data"]} == {directory.name, "one"}
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
        assert text("one") == 404 and client.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 404
        assert text(directory.name) == plain
    with serving(directory, "--adapter", f"two={inside / 'one'}") as server, server.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [directory.name, "two"]
        assert client.post("/v1/load_lora_adapter", json={"lora_name": "one", "lora_path": "one"}).status_code == 403
