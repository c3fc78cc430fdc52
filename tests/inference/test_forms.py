"""Forms that are too much, and what is told of those that cannot be followed."""

from __future__ import annotations

import json

import pytest
import torch

import fw
from fw.errors import UserError
from fw.inference.options import Sampling
from fw.inference.sampling import NO_TOKEN, NOT_FINITE
from serving import make_model

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "bytes")


@pytest.fixture(scope="module")
def llm(place):
    return fw.LLM(place, dtype="fp32")


def _deep(depth):
    found: dict = {"type": "integer"}
    for _ in range(depth):
        found = {"items": found}
    return found


@pytest.mark.parametrize(
    "form, said",
    [
        ({"json_schema": {"enum": ["x" * (128 << 10)]}}, "characters are more than the 131,072"),
        ({"json_schema": json.dumps({"enum": ["x" * (128 << 10)]})}, "characters are more than the 131,072"),
        ({"regex": "x" * 32_769}, "regex: 32,769 characters are more than the 32,768"),
        ({"grammar": 'start: "x"' + " " * 32_768}, "grammar: 32,778 characters"),
        ({"json_schema": _deep(5000)}, "nested too deeply"),
        ({"json_schema": {"enum": [{1, 2}]}}, "json_schema: not JSON"),
    ],
    ids=["schema", "its text", "regex", "grammar", "deep", "no JSON"],
)
def test_bounds_are_said_before_anything_is_made(form, said):
    with pytest.raises(UserError, match=said):
        Sampling(**form)


@pytest.mark.parametrize(
    "link", [lambda to: to, lambda to: {"type": "object", "properties": {"a": to}, "required": ["a"]}], ids=["alone", "objects"]
)
def test_long_chains_are_followed(llm, link):
    """Of as many names as overflow the stack of a program's first thread."""
    names = {f"d{n}": link({"$ref": f"#/$defs/d{n + 1}"}) for n in range(1400)}
    schema = {"$defs": {**names, "d1400": {"enum": [7]}}, "$ref": "#/$defs/d0", "x-guidance": {"whitespace_flexible": False}}
    (found,) = llm.generate("x", json_schema=schema, max_tokens=40, temperature=0)
    assert found.text in ("7", ('{"a":' * 8))


def test_a_form_that_turns_out_too_much_ends_its_request(llm):
    """After its first token, which is allowed; nothing of it is taken for whole."""
    schema = {"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "integer"}}} for n in range(250)]}
    with pytest.raises(UserError, match="cannot be followed: Parser Error"):
        llm.generate(["x"], json_schema=schema, max_tokens=20, temperature=0)
    assert not len(llm.engine)


def test_who_is_to_blame_for_no_token(llm, monkeypatch):
    """The model for what is no number, the request for what it rules out."""
    sampling = Sampling(max_tokens=4, temperature=0)
    bias = dict.fromkeys(range(llm.engine.vocab_size), -3.4e38)
    llm.engine.add("ruled out", [5], Sampling(max_tokens=4, temperature=0, logit_bias=bias))
    run = llm.engine.runner.run
    monkeypatch.setattr(llm.engine.runner, "run", lambda pieces, *more: [row - 3e38 for row in run(pieces, *more)])
    (result,) = llm.engine.step()[1]
    assert (result.error, result.fault) == (NO_TOKEN, None)
    llm.engine.add("broken", [5], sampling)
    monkeypatch.setattr(llm.engine.runner, "run", lambda pieces, *more: [row * torch.nan for row in run(pieces, *more)])
    (result,) = llm.engine.step()[1]
    assert result.error == result.fault == NOT_FINITE


def test_wishes_count_the_same_at_every_step(llm, place):
    """Penalties and biases by hand, of logits that the model gives by itself."""
    prompt = [50, 51, 50, 60]
    wishes = {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.9, "logit_bias": {70: 2.5, 80: -1.5}}
    (found,) = llm.generate([prompt], max_tokens=40, temperature=0, ignore_eos=True, min_tokens=40, stop_token_ids=[90], **wishes)
    ids, model = list(prompt), fw.load_model(place)
    for _ in range(40):
        row = model(torch.tensor([ids])).detach()[0, -1].float()
        row[70] += 2.5
        row[80] -= 1.5
        for token in set(ids):
            row[token] = row[token] / 1.7 if row[token] > 0 else row[token] * 1.7
        own = ids[len(prompt) :]
        for token in set(own):
            row[token] -= 0.4 + 0.9 * own.count(token)
        if len(own) < 40:
            row[[*llm.engine.ends, 90]] = -torch.inf
        ids.append(int(row.argmax()))
    assert found.token_ids == ids[len(prompt) :]
