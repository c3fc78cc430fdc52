"""Answers of a form that is asked for, read by parsers that know nothing of how they came about."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers

import fw
from conftest import fw as run_fw
from fw.errors import UserError
from fw.tokenizer import Tokenizer
from models.architectures import VOCABULARY, save

pytest.importorskip("llguidance")

SPECIAL = ["<unk>", "<s>", "</s>"]
MERGES = [("{", '"'), ("t", "r"), ("tr", "u"), ("tru", "e"), ("1", "2"), (",", '"'), ('"', ":"), ("a", "b"), ("ab", "c")]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of a model that has learnt nothing, whose tokens are bytes and a few longer ones."""
    place = tmp_path_factory.mktemp("bytes")
    save("llama", place)
    letters = ["Ġ", "Ċ", *(chr(n) for n in range(33, 127)), *(a + b for a, b in MERGES)]
    letters += [f"ÄĢ{n}" for n in range(VOCABULARY - len(SPECIAL) - len(letters))]
    backend = Backend(models.BPE({token: n for n, token in enumerate([*SPECIAL, *letters])}, MERGES, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    Tokenizer.from_backend(backend, bos_token="<s>", eos_token="</s>").save(place)
    return place


def test_json_by_a_schema(llm):
    results = llm.generate(["one", "another one", "x"] * 8, max_tokens=200, temperature=1.5, seed=3, json_schema=SCHEMA)
    values = [json.loads(result.text) for result in results]
    for value, result in zip(values, results, strict=True):
        assert result.finish_reason == "stop"
        assert list(value) == ["name", "age", "tags", "ok"]
        assert isinstance(value["name"], str) and len(value["name"]) <= 5 and 0 <= value["age"] <= 120
        assert 1 <= len(value["tags"]) <= 2 and set(value["tags"]) <= {"x", "y"} and value["ok"] in (True, False)
    several = llm.generate(["one"], n=6, max_tokens=200, temperature=1.5, seed=1, json_schema=json.dumps(SCHEMA))[0].completions
    assert len({json.loads(each.text)["name"] for each in several}) > 1, "each answer goes its own way"


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-f]{2}", r"(abc|abd)+x", r"true|tree", r"\{\"a\": 12\}"])
def test_expressions(llm, pattern):
    for temperature in (0, 2):
        for result in llm.generate(["a", "bc", "xyz"], max_tokens=60, temperature=temperature, seed=5, regex=pattern):
            assert result.finish_reason == "length" or re.fullmatch(pattern, result.text), result.text


def test_grammars(llm):
    grammar = 'start: item ("," item)* ";"\nitem: "a" | "b" "(" start ")"\n'
    for result in llm.generate(["a", "bc"] * 4, max_tokens=150, temperature=1, seed=2, logit_bias={9: 1.0}, grammar=grammar):
        opened = result.text.count("(")
        assert re.fullmatch(r"[ab,;()]*", result.text)
        assert result.finish_reason == "length" or opened == result.text.count(")")


def test_the_likeliest_of_what_is_allowed(llm, directory):
    """By hand: of five digits, in tokens of one and the one of two, the likeliest that leaves room for the rest."""
    model = fw.load_model(directory)
    lengths = {token: len(text) for text, token in llm.tokenizer._backend.get_vocab().items() if re.fullmatch("[0-9]+", text)}
    assert sorted(lengths.values()) == [1] * 10 + [2]
    prompt = llm.encode("some text")
    ids, left = list(prompt), 5
    while left:
        logits = model(torch.tensor([ids])).detach()[0, -1]
        ids.append(max((token for token, length in lengths.items() if length <= left), key=lambda token: float(logits[token])))
        left -= lengths[ids[-1]]
    result = llm.generate([prompt], max_tokens=20, temperature=0, regex="[0-9]{5}")[0]
    end = llm.tokenizer.eos_id
    assert [token for token in result.token_ids if token != end] == ids[len(prompt) :] and result.finish_reason == "stop"
    assert re.fullmatch("[0-9]{5}", result.text)
    assert result.logprobs[0] == pytest.approx(
        float(model(torch.tensor([prompt])).detach()[0, -1].log_softmax(-1)[result.token_ids[0]]), abs=1e-4
    ), "of the model itself"


def test_company_and_other_wishes(llm, directory):
    asked = {"max_tokens": 60, "temperature": 0, "json_schema": SCHEMA}
    alone = [llm.generate([prompt], **asked)[0].text for prompt in ("one", "two", "a third")]
    each = llm.engine.reads.token_bytes
    small = fw.LLM(directory, dtype="fp32", max_context=100, kv_budget=f"{int(each * 128)}B", step_tokens=8, max_sequences=3)
    small.engine.add("free", small.encode("hello"), small.sampling(max_tokens=50, temperature=0, ignore_eos=True))
    assert [result.text for result in small.generate(["one", "two", "a third"], **asked)] == alone
    assert small.engine.scheduler.preemptions
    # A form that is whole ends, whatever else was wished for.
    for result in llm.generate(["a"], max_tokens=30, min_tokens=20, ignore_eos=True, temperature=0, regex="abc"):
        assert result.text == "abc" and result.finish_reason == "stop"


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"regex": "a("}, "regex: "),
        ({"grammar": "start: missing"}, "grammar: "),
        ({"json_schema": {"type": "nothing"}}, "json_schema: "),
        ({"json_schema": "{"}, "json_schema: not JSON: "),
        ({"json_schema": 3}, "json_schema: 3 is no schema"),
        ({"regex": 3}, "regex: 3 is no text"),
        ({"regex": "a", "json_schema": {}}, "json_schema and regex: an answer has one form; give one of them"),
    ],
)
def test_what_is_no_form(llm, settings, said):
    with pytest.raises(UserError, match=re.escape(said)):
        llm.generate(["a"], **settings)
    assert not len(llm.engine)


def test_where_it_cannot_be_had(llm, monkeypatch, tmp_path):
    import tokens

    save("llama", tmp_path)
    tokens.save(tmp_path, VOCABULARY)
    with pytest.raises(UserError, match="structured output does not know this kind of tokenizer: "):
        fw.LLM(tmp_path).generate(["a"], regex="a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UserError, match=r"structured output .* needs llguidance: pip install 'fw\[structured\]'"):
        llm.generate(["a"], regex="a")


def test_files_and_options(directory, tmp_path):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_flexible": False}
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    lines = [
        {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 40, "response_format": form}},
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "a", "response_format": {"type": "xml"}}},
        {"prompt": "a", "regex": "x{3}"},
        {"prompt": "a"},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    run_fw("generate", str(directory), *files, "--grammar", 'start: "yes" | "no"').ok()
    told = {line["line"]: line for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    assert set(json.loads(told[1]["response"]["body"]["choices"][0]["text"])) == {"ok"}
    assert "response_format: {'type': 'xml'} is neither text, nor json_object" in told[2]["error"]["message"]
    assert told[3]["text"] == "xxx" and told[4]["text"] in ("yes", "no"), "a line's own form is in place of the command's"
    for given in (str(tmp_path / "schema.json"), json.dumps(schema)):
        assert json.loads(run_fw("generate", str(directory), "a", "--json-schema", given).ok().out)["ok"] in (True, False)
