"""What goes wrong with one request ends that request alone; what no request could go on after ends the engine."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import threading
from contextlib import closing
from multiprocessing import Pipe
from types import SimpleNamespace

import httpx
import pytest

import fw
from fw.inference.options import Sampling
from fw.inference.text import AnswerText
from fw.server.engine import EngineProcess, Ticket
from fw.server.errors import ApiError
from fw.server.messages import Abort, Add, Begin, DropAdapter, Hold, LoadAdapter, Release, Stepped
from fw.server.settings import settings
from fw.server.worker import Served
from serving import make_model, serving, until

ASKED = Sampling(max_tokens=6, temperature=0, ignore_eos=True)
BUSY = {"max_tokens": 1900, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(directory):
    return fw.LLM(directory, dtype="fp32")


@pytest.fixture(scope="module")
def loaded(directory):
    """What an engine's process has, of one sequence at once."""
    found = settings(str(directory), ["inference.dtype=fp32", "inference.max_sequences=1"])
    return Served(Begin(found.path, found.config, None, []))


@pytest.fixture
def served(loaded):
    yield loaded
    for key in list(loaded._engine._requests):
        loaded._engine.abort(key)
    loaded._whole = True
    assert loaded.said().state.kv_used_bytes == 0


def _results(served):
    found = {}
    while served.busy:
        found |= {result.key: result for result in served.step().results}
    return found


def _taken(served, **requests):
    for key, text in requests.items():
        served.take(Add(key, served.llm.encode(text), ASKED), None)


def test_what_cannot_be_sent_fails_alone():
    """Of an engine whose process nobody needs: what it is told is read here."""
    ours, theirs = Pipe()
    process = SimpleNamespace(pid=0, wait=lambda patience: 0)
    child = SimpleNamespace(connection=ours, process=process, fate=lambda told: "ended", end=lambda patience: ours.close())

    async def ask():
        engine = EngineProcess(child, 0, lambda engine: None, lambda why: None)
        deep: list = []
        for _ in range(100_000):
            deep = [deep]
        for key, prompt, status in (("a lock", [threading.Lock()], 500), ("deep", deep, 400)):
            ticket = Ticket(engine, key, 1)
            engine.begin(ticket, Add(key, prompt, ASKED))
            with pytest.raises(ApiError) as found:
                await ticket.next()
            assert found.value.status == status and not engine.sequences
        while deep:  # by hand: the interpreter would follow it as deeply
            deep = deep.pop()
        with pytest.raises(ApiError) as found:
            await engine.change(LoadAdapter("a change", "name", threading.Lock()))
        assert found.value.status == 500
        engine.begin(Ticket(engine, "whole", 1), Add("whole", [1], ASKED))
        assert (await asyncio.to_thread(theirs.recv)).key == "whole"
        theirs.close()
        await engine.close()

    asyncio.run(ask())


@pytest.mark.parametrize("said", [b"no message", b"", pickle.dumps(Stepped)[:-4]])
def test_an_engine_that_cannot_be_understood_ends(monkeypatch, said):
    """And whoever waits for it is told: nothing of what follows could be trusted. A message of no bytes reads as the end of all."""
    monkeypatch.setattr("fw.server.engine._PATIENCE_S", 0.1)

    async def ask():
        ours, theirs = Pipe()
        with closing(ours), closing(theirs), subprocess.Popen(["sleep", "600"]) as process:
            gone = asyncio.Event()
            child = SimpleNamespace(connection=ours, process=process, fate=lambda told: f"ended {process.poll()}")
            engine = EngineProcess(child, 0, lambda engine: None, lambda why: gone.set())
            ticket = Ticket(engine, "waits", 1)
            engine.begin(ticket, Add("waits", [1], ASKED))
            await asyncio.to_thread(theirs.send_bytes, said)
            with pytest.raises(ApiError, match="engine has ended") as found:
                await ticket.next()
            assert found.value.status == 500
            await gone.wait()
            assert process.poll() == -9

    asyncio.run(ask())


def test_a_request_that_cannot_be_taken(served, llm, monkeypatch):
    add = served._engine.add

    def broken(key, *rest):
        if key == "bad":
            raise ValueError("of a test")
        add(key, *rest)

    monkeypatch.setattr(served._engine, "add", broken)
    _taken(served, good="once", bad="twice")
    stepped = served.step()
    assert list(stepped.failed) == ["bad"] and "ValueError" in stepped.failed["bad"] and not stepped.refused
    assert _results(served)["good"].text == llm.generate("once", ASKED)[0].text


def test_a_step_that_fails_takes_along_who_is_in_it(served, llm, monkeypatch):
    runner = served._engine.runner
    run = runner.run
    _taken(served, first="once", second="twice")
    served.step()
    monkeypatch.setattr(runner, "run", lambda *given: (_ for _ in ()).throw(RuntimeError("of a test")))
    stepped = served.step()
    if "first" not in stepped.failed:  # the step that failed was begun ahead
        stepped = served.step()
    assert list(stepped.failed) == ["first"] and "RuntimeError" in stepped.failed["first"]
    monkeypatch.setattr(runner, "run", run)
    found = _results(served)
    assert list(found) == ["second"] and found["second"].text == llm.generate("twice", ASKED)[0].text


def test_an_engine_that_only_fails_ends(served, monkeypatch):
    _taken(served, first="once", second="twice")
    monkeypatch.setattr(served._engine.runner, "run", lambda *given: (_ for _ in ()).throw(RuntimeError("of a test")))
    assert list(served.step().failed) == ["first"]
    with pytest.raises(RuntimeError, match="of a test"):
        served.step()


def test_a_device_that_is_gone_ends_the_engine(served, monkeypatch):
    def gone():
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(served, "_check_there", gone)
    monkeypatch.setattr(served._engine.runner, "run", lambda *given: (_ for _ in ()).throw(RuntimeError("of a test")))
    _taken(served, first="once", second="twice")
    with pytest.raises(RuntimeError, match="CUDA error"):
        served.step()


def test_an_answer_whose_text_fails(directory, llm, monkeypatch):
    """Beside others in the same steps, and with others of the same request."""
    several = fw.LLM(directory, dtype="fp32")
    push = AnswerText.push

    def broken(text, token):
        if text._stops == ("bad",) and text._tokens == 2:
            raise ValueError("of a test")
        return push(text, token)

    monkeypatch.setattr(AnswerText, "push", broken)
    several.engine.add("bad", several.encode("once"), Sampling(max_tokens=6, seed=1, n=2, stop="bad", ignore_eos=True))
    several.engine.add("good", several.encode("twice"), ASKED)
    found = {}
    while len(several.engine):
        found |= {result.key: result for result in several.engine.step()[1]}
    assert found["bad"].error == "ValueError: of a test" and "in broken" in found["bad"].fault
    assert [each.finish_reason for each in found["bad"].completions] == ["abort", "abort"]
    assert found["good"].fault is None and found["good"].text == llm.generate("twice", ASKED)[0].text


def test_an_adapter_that_is_none(served, monkeypatch):
    monkeypatch.setattr(served.llm, "load_adapter", lambda name, directory: {}["weights"])
    said = []
    served.take(LoadAdapter("key", "name", "place"), SimpleNamespace(send=said.append))
    assert said[0].error == "KeyError: 'weights'" and not served.busy


def test_forms_are_made_beside_steps(served, monkeypatch):
    """Steps go on while one is made; a request that is left meanwhile never runs, and one whose form fails ends alone."""
    pytest.importorskip("llguidance")
    go, form = threading.Event(), served._engine.structure.form

    def slow(sampling):
        assert sampling.form is None or go.wait(60)
        if sampling.regex == "b":
            raise ValueError("of a test")
        return form(sampling)

    monkeypatch.setattr(served._engine.structure, "form", slow)
    for key, regex in (("left", "x"), ("formed", "a{3}"), ("failing", "b"), ("wrong", "(")):
        served.take(Add(key, [5, 6], Sampling(max_tokens=9, temperature=0, regex=regex)), None)
    _taken(served, plain="once")
    served.take(Abort("left"), None)
    assert served.said().state.waiting == 4 and list(_results(served)) == ["plain"]
    go.set()
    for _ in range(4):
        assert served.forming.ready.poll(60)
        served.take_form()
    stepped = served.said()
    assert list(stepped.failed) == ["failing"] and "ValueError" in stepped.failed["failing"]
    assert list(stepped.refused) == ["wrong"] and stepped.refused["wrong"].startswith("regex: ")
    found = _results(served)
    assert list(found) == ["formed"] and found["formed"].text == "aaa"


def test_a_request_keeps_the_adapter_that_was_there_when_it_came(served, monkeypatch):
    """However long its form takes, and, where it is held, however late its parts come."""
    pytest.importorskip("llguidance")
    adapters, form, go = served._engine.adapters, served._engine.structure.form, threading.Event()
    monkeypatch.setattr(adapters, "_read", lambda directory: {})
    monkeypatch.setattr("fw.inference.llm.settled", lambda directory, *wanted: directory)

    def slow(sampling):
        assert sampling.form is None or go.wait(60)
        return form(sampling)

    monkeypatch.setattr(served._engine.structure, "form", slow)
    said = SimpleNamespace(send=lambda done: None)
    formed = Sampling(max_tokens=9, temperature=0, regex="a{3}")
    served.take(LoadAdapter("load", "mine", "one"), said)
    first = adapters.find("mine")
    for key in ("formed", "left"):
        served.take(Add(key, [5, 6], formed, adapter="mine"), said)
    served.take(Hold("parts", "mine"), said)
    served.take(DropAdapter("drop", "mine"), said)
    served.take(Add("late", [5, 6], ASKED, adapter="mine", held="parts"), said)
    served.take(Add("none", [5, 6], formed, adapter="mine"), said)
    served.take(LoadAdapter("load again", "mine", "another"), said)
    served.take(Release("parts"), said)
    served.take(Add("new", [5, 6], ASKED, adapter="mine"), said)
    served.take(Abort("left"), said)
    go.set()
    for _ in range(2):
        assert served.forming.ready.poll(60)
        served.take_form()
    assert "no adapter 'mine'" in served.said().refused["none"]
    has = {key: request.adapter for key, request in served._engine._requests.items()}
    assert has == {"late": first, "new": adapters.find("mine"), "formed": first} and first is not has["new"] and not served._kept
    assert set(_results(served)) == {"late", "new", "formed"}
    served.take(DropAdapter("drop again", "mine"), said)


def _chain(length, link):
    names = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(length)}
    return {"json_schema": {"$defs": {**names, f"d{length}": {"type": "integer"}}, "$ref": "#/$defs/d0"}}


def _nested(depth):
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"json_schema": schema}


FORMS = {
    "references": _chain(3000, lambda to: to),
    "objects": _chain(1500, lambda to: {"type": "object", "properties": {"a": to}}),
    "lists": _chain(1300, lambda to: {"type": "array", "prefixItems": [to, to]}),
    "nested": _nested(40),
    "nested more": _nested(200),
    "rules": {"grammar": "start: r0\n" + "".join(f"r{n}:r{n + 1}\n" for n in range(2400)) + 'r2400: "x"\n'},
    "options": {"grammar": "start: r0\n" + "".join(f"r{n}:(r{n + 1})?\n" for n in range(1800)) + 'r1800: "x"\n'},
    "doubled": {"grammar": "start: R0\n" + "".join(f"R{n}: R{n + 1} R{n + 1}\n" for n in range(15)) + 'R15: "a"?\n'},
    "optional": {"regex": "a?" * 15_000},
    "brackets": {"regex": "(" * 9_000 + "a" + ")" * 9_000},
    "long": {"regex": "a" * 40_000},
    "alternatives": {"json_schema": {"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "integer"}}} for n in range(250)]}},
}


@pytest.fixture(scope="module")
def small(directory):
    """Two sequences at once, one may wait."""
    with serving(directory, "inference.max_sequences=2", "--max-queue", "1") as made:
        yield made


@pytest.mark.parametrize("name", FORMS)
def test_no_form_ends_the_engine(small, name):
    """Where it is too much, that is said; another answer goes on meanwhile."""
    pytest.importorskip("llguidance")
    engine = small.engine()
    with small.client() as client, closing(small.raw()) as sock:
        body = json.dumps({"prompt": "x", "stream": True, **BUSY}).encode()
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        sock.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: small.stats()["running"] == 1)
        for stream in (False, True):
            found = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "stream": stream, **FORMS[name]})
            assert found.status_code in (200, 400), found.text
            if name in ("optional", "doubled", "brackets", "long", "nested more"):
                assert found.status_code == 400 and found.json()["error"]["type"] == "invalid_request_error"
            assert '"abort"' not in found.text
    small.idle()
    os.kill(engine, 0)


def test_a_form_that_cannot_be_followed_is_said_amid_the_answer(small):
    pytest.importorskip("llguidance")
    asked = {"prompt": "x", "max_tokens": 40, "temperature": 0, **FORMS["alternatives"]}
    with small.client() as client:
        found = client.post("/v1/completions", json=asked)
        assert found.status_code == 400 and "cannot be followed" in found.json()["error"]["message"]
        text = client.post("/v1/completions", json={**asked, "stream": True}).text
        assert "cannot be followed" in text and '"abort"' not in text
    small.idle()


def test_logits_that_are_no_numbers_are_not_the_clients_fault(tmp_path):
    from transformers import AutoModelForCausalLM

    place = make_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(place)
    model.model.norm.weight.data.fill_(float("nan"))
    model.save_pretrained(place)
    with serving(place, "inference.dtype=fp32") as server, server.client() as client:
        asked = {"prompt": "x", "max_tokens": 3}
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
        for path, body in (("/v1/completions", asked), ("/v1/completions", {**asked, "n": 2}), ("/v1/chat/completions", chat)):
            found = client.post(path, json=body)
            assert found.status_code == 500 and found.json()["error"]["type"] == "server_error"
            assert "logits are not finite" in found.json()["error"]["message"]
            text = client.post(path, json={**body, "stream": True}).text
            assert "logits are not finite" in text and '"abort"' not in text
        log = until(lambda: len([line for line in server.log if "failed" in line]) == 6 and server.log)
        failed = {line["failed"] for line in log if "failed" in line}
        assert len(failed) == 6 and {line["message"].split()[0] for line in log if line["event"] == "log"} == failed
        assert client.get("/health").status_code == 200
        server.idle()


def test_a_dead_engine_is_no_health(directory):
    from fw.server.api import Api
    from fw.server.app import create_app
    from fw.server.batches import Batches
    from fw.server.engines import Engines
    from fw.server.logs import Log

    wanted = settings(str(directory), [])

    async def ask(condition):
        engines = Engines(wanted, SimpleNamespace(begin=None, begun=0.0, children=[]))
        engines.condition = condition
        api, log = Api(wanted, engines), Log(None)
        transport = httpx.ASGITransport(create_app(api, Batches(api, log), log))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get(path) for path in ("/health", "/ready", "/openapi.json")]

    health, ready, document = asyncio.run(ask("failed"))
    assert (health.status_code, health.json()["status"]) == (503, "failed") and ready.status_code == 503
    for path in ("/health", "/ready"):
        told = document.json()["paths"][path]["get"]["responses"]["503"]["content"]["application/json"]["schema"]
        assert told == {"$ref": "#/components/schemas/Condition"}, "what it says of itself"
    health, ready, _ = asyncio.run(ask("loading"))
    assert (health.status_code, health.json()["status"]) == (200, "ok") and ready.json()["status"] == "loading"
