"""Adapters by their names: on every engine or on none, each name once, and directories called whatever they like."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

import fw.server.run
import fw.server.signals
from conftest import fw as run_fw
from fw.cli import main
from fw.config import ServeSection
from fw.errors import UserError
from fw.inference.options import Sampling
from fw.server.api import Api
from fw.server.engines import Engines
from fw.server.errors import ApiError
from fw.server.messages import Done, LoadAdapter
from fw.server.settings import settings
from serving import serving

ODD = """it's {a}, [b]=#1: "d" ${c} \\${e} & more"""


class Engine:
    """What the server sees of one: adapters in a dict, and what is called before it hears a message."""

    def __init__(self, refuses=(), before=lambda message: None):
        self.loaded, self.adapters, self._refuses, self._before = object(), {}, refuses, before

    async def change(self, message):
        self._before(message)
        await asyncio.sleep(0)
        failed = None
        if not isinstance(message, LoadAdapter):
            del self.adapters[message.name]
        elif message.directory in self._refuses or message.name in self.adapters:
            failed = f"{message.directory} is refused"
        else:
            self.adapters[message.name] = message.directory
        return Done(message.key, failed, list(self.adapters))


def _served(*engines):
    """Them, ready, and what requests see of them."""
    told = SimpleNamespace(name="tiny", serve=ServeSection())
    made = Engines(told, SimpleNamespace(begin=0.0, children=[]))
    made.condition, made.tokenizer, made._engines = "ready", object(), list(engines)
    return made, Api(told, made)


def test_an_adapter_that_one_engine_refuses_is_on_none():
    async def run():
        seen = []

        def look(message):
            with pytest.raises(ApiError, match="does not exist"):  # nobody asks an engine for what it may not have
                api.adapter(message.name)
            seen.append(message)

        first, second = Engine(before=look), Engine(refuses=("torn",), before=look)
        engines, api = _served(first, second)
        with pytest.raises(ApiError, match="torn is refused"):
            await engines.load_adapter("mine", "torn")
        assert first.adapters == second.adapters == {} and not engines.adapters and len(seen) == 3
        await engines.load_adapter("mine", "whole")
        assert first.adapters == second.adapters == {"mine": "whole"} and api.adapter("mine") == "mine"
        await engines.drop_adapter("mine")
        assert first.adapters == second.adapters == {} and len(seen) == 7

    asyncio.run(run())


def test_of_two_that_load_one_name_at_once_one_has_it():
    async def run():
        first, second = Engine(), Engine()
        engines, _ = _served(first, second)
        done = await asyncio.gather(*(engines.load_adapter("mine", each) for each in ("a", "b")), return_exceptions=True)
        assert done[0] is None and "already" in str(done[1]) and done[1].status == 400
        assert first.adapters == second.adapters == {"mine": "a"} and engines.adapters == ["mine"]
        done = await asyncio.gather(*(engines.drop_adapter("mine") for _ in range(2)), return_exceptions=True)
        assert done[0] is None and done[1].status == 404 and not engines.adapters

    asyncio.run(run())


def test_an_adapter_that_has_gone_while_a_prompt_was_read():
    async def run():
        engines, _ = _served(Engine())
        with pytest.raises(ApiError, match="does not exist any more") as found:
            engines.submit([[1]], Sampling(), "mine")
        assert found.value.status == 404 and found.value.code == "model_not_found"
        with pytest.raises(ApiError, match="there is a model 'tiny' already"):
            await engines.load_adapter("tiny", "whole")

    asyncio.run(run())


@pytest.mark.parametrize("words", [["model=x"], ["a=x", "b=x", "a=y"]])
def test_a_name_that_is_taken(tmp_path, words):
    (tmp_path / "model").mkdir()
    given = [word for each in words for word in ("--adapter", each)]
    found = run_fw("serve", str(tmp_path / "model"), "--port", "0", *given)
    assert found.code == 2 and f"two models would have the name {words[0][0] if len(words) > 1 else 'model'}" in found.err
    with pytest.raises(UserError, match="two models would have the name ours"):
        settings(str(tmp_path / "model"), ["serve.name=ours", "serve.adapters=[ours=x]"])


@pytest.mark.parametrize(
    "text", ["a,b", "{a: b}", "[a]", "'a", "~", "007", "true", "a #b", "a: b", "${a}", "\\${a}", "\\\\${oc.env:HOME}", "x=y", ODD]
)
def test_options_are_taken_as_they_are_written(monkeypatch, text):
    given = []
    monkeypatch.setattr(fw.server.run, "run", lambda made: given.append(made) or 0)
    monkeypatch.setattr(fw.server.signals, "leaving", nullcontext)  # signals are pytest's
    words = ["serve", "model", "--adapter", f"one={text}", "--adapter", f"two=/{text}", "--name", text]
    assert main([*words, "--adapters-dir", text, "serve.name=other", "serve.files_dir=/x/${serve.name}"]) == 0
    (made,) = given
    assert made.adapters == [("one", text), ("two", f"/{text}")] and made.name == text and made.serve.adapters_dir == text
    assert made.serve.files_dir == f"/x/{text}", "what refers to an option has it, too"


@pytest.mark.parametrize(("option", "text"), [("port", "x"), ("port", "70000"), ("max-queue", "1.5"), ("timeout", "[1]"), ("drain", "-1")])
def test_an_option_that_is_wrong(directory, option, text):
    found = run_fw("serve", str(directory), f"--{option}={text}")
    assert found.code == 2 and f"command line: serve.{option.replace('-', '_')}: " in found.err


def test_a_directory_of_any_name(directory, tmp_path):
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / ODD)
    with serving(directory, "--adapter", f"odd={tmp_path / ODD}") as server, server.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == [directory.name, "odd"]
        assert client.post("/v1/completions", json={"model": "odd", "prompt": "x", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("text", ["*", "'*'", "['*']", "[https://one.example, '*']"])
def test_all_origins(text):
    assert "*" in settings("model", [f"serve.cors_origins={text}"]).serve.cors_origins


@pytest.mark.parametrize("text", ["[*]", "one.example", "https://one.example/", "https://*.example", "[https://a.example,b.example]"])
def test_what_is_no_origin(text):
    with pytest.raises(UserError, match=r"serve\.cors_origins: .* is no origin"):
        settings("model", [f"serve.cors_origins={text}"])
