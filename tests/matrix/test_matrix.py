"""What is said of pairs of plugins: that nothing is left out, and a tenth of the runs again that say so."""

from __future__ import annotations

import json
import random
import re
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
import yaml

from conftest import fw
from distributed.operators import has_libaio
from fw import registry
from fw.kinds import KINDS
from fw.support import telling
from fw.support.causes import CAUSES, cause_of
from fw.support.matrix import APART, Matrix, Refusal, Runs
from matrix.covering import all_pairs, cover, pairs_of
from matrix.levels import GENERATING, PARTS, TRIPLES, prepare
from matrix.running import generate, train

ROOT = Path(__file__).parents[2]
MATRIX = Matrix.read()
NOT_HERE = {("attention", "flash_attn")}
"""It wants a GPU."""
TENTHS = 10


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("matrix") / "files"
    place.mkdir()
    prepare(place)
    return place


def named(each: object) -> str:
    """Of a parameter, the same each time."""
    return " with ".join(f"{kind} {name}" for kind, name in sorted(each.of)) if isinstance(each, Refusal) else each.__name__


def tenth(of: list) -> list:
    """The same ones each time, spread over all."""
    return of[:: max(1, len(of) // max(1, round(len(of) / TENTHS)))]


def test_every_plugin_of_fws_own_is_in_it():
    presets = {name for name in (entry.name for entry in registry.entries("model")) if re.search(r"[-.]", name)}
    own = {(kind, entry.name) for kind in KINDS for entry in registry.entries(kind) if entry.distribution == registry.OWN}
    told = {(kind, name.partition(",")[0]) for kind, names in MATRIX.kinds.items() for name in names}
    left_out = {each for each in own - told if each[1] not in presets and each[0] != "offload"}
    assert left_out == NOT_HERE, "offload is one plugin, of which options are told"
    assert {kind: list(names) for kind, names in PARTS.items()} == MATRIX.training.kinds
    assert {kind: list(names) for kind, names in GENERATING.items()} == MATRIX.generating.kinds


def test_no_pair_is_untested():
    left = [
        (one, other)
        for a, b in combinations(MATRIX.kinds, 2)
        for one, other in product([(a, name) for name in MATRIX.kinds[a]], [(b, name) for name in MATRIX.kinds[b]])
        if MATRIX.status(one, other) == "untested" and one not in APART and other not in APART
    ]
    assert not left
    for triple in TRIPLES:
        refused = any(each.of <= set(triple) for each in MATRIX.training.refusals)
        assert refused or any(set(triple) <= set(row.items()) for row in MATRIX.training.rows), triple


def test_every_refusal_has_a_reason_and_a_way_out():
    for each in MATRIX.refusals:
        assert len(each.sentence) > 40 and re.search(r"because|use |set |choose|; ", each.sentence), each


def test_every_refusal_has_one_cause_and_every_cause_a_refusal():
    for each in MATRIX.refusals:
        assert sum(cause.told in each.sentence for cause in CAUSES) == 1, each
    assert {cause_of(each.sentence) for each in MATRIX.refusals} == set(CAUSES)
    assert all((cause.source is None) == (cause.whose == "fw") and (cause.shown is None) == (cause.whose != "upstream") for cause in CAUSES)


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause.shown], ids=lambda cause: cause.told)
def test_causes_of_other_projects_are_in_their_code(cause):
    file, piece = cause.shown
    package = pytest.importorskip(file.partition("/")[0])
    assert piece in (Path(package.__file__).parents[1] / file).read_text(), f"{cause.why} Is it still so?"


@pytest.mark.parametrize("row", tenth(list(MATRIX.training.rows)), ids=lambda row: f"{row['model']}, {row['sharding']}, …")
def test_a_tenth_trains_is_saved_and_goes_on(row, files, tmp_path):
    if row["offload"] == "optimizer to files" and row["sharding"].startswith("zero") and not has_libaio():
        pytest.skip("DeepSpeed's files need g++ and libaio's header")
    if row["precision"] == "fp16" and row["sharding"].startswith("zero") and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed computes in float16 on processors that do so themselves")
    outcome = train(row, files, tmp_path)
    assert outcome.code == 0, outcome.told


@pytest.mark.parametrize("row", tenth(list(MATRIX.generating.rows)), ids=lambda row: ", ".join(row.values()))
def test_a_tenth_generates(row, files, tmp_path):
    outcome = generate(row, files, tmp_path)
    assert outcome.code == 0, outcome.told


@pytest.mark.parametrize(
    ("run", "refusal"),
    [*((train, each) for each in tenth(list(MATRIX.training.refusals))), *((generate, each) for each in MATRIX.generating.refusals)],
    ids=named,
)
def test_what_is_refused_is_so_with_its_sentence(run, refusal, files, tmp_path):
    outcome = run(dict(refusal.of), files, tmp_path)
    assert outcome.refused and outcome.sentence == refusal.sentence, outcome.told


def test_the_page_is_what_is_known():
    assert (ROOT / "docs" / "support-matrix.md").read_text() == telling.page(MATRIX)


def test_ready_configs_use_nothing_that_is_refused():
    for path in (ROOT / "configs").glob("*.yaml"):
        tree = yaml.safe_load(path.read_text())
        each = [
            (kind, one) for kind, value in tree.items() if kind in MATRIX.kinds for one in (value if isinstance(value, list) else [value])
        ]
        used = [(kind, value if isinstance(value, str) else value.get("name")) for kind, value in each if value]
        for one, other in combinations(used, 2):
            known = all(name in MATRIX.kinds[kind] for kind, name in (one, other))
            assert not known or MATRIX.status(one, other) != "refused", (path, one, other)


def test_the_command_prints_numbers_and_two_kinds():
    numbers = fw("plugins", "matrix").ok().out
    assert all(f" {kind} " in numbers for kind in MATRIX.kinds)
    assert re.search(rf"\d+ pairs: \d+ proven, \d+ refused, \d+ independent, by {MATRIX.runs} runs", numbers)
    told = fw("plugins", "matrix", "quantization", "peft").ok().out
    lines = told.splitlines()
    (header,), *rows = ([line for line in lines if line.startswith(begin)] for begin in ("peft \\ quantization", "none ", "lora ", "dora "))
    assert [row[0][header.index(" nf4 ") + 1] for row in rows] == ["x", "+", "x"]
    at = lines.index("x peft 'dora' with quantization 'nf4'")
    assert lines[at + 1].startswith("  quantization 'nf4' does not work with peft 'dora', because")
    assert lines[at + 2 : at + 4] == [
        "  DoRA divides by the norm of weight and change together, in every step; from codes that is the whole weight decoded again.",
        "  https://arxiv.org/abs/2402.09353",
    ]
    found = json.loads(fw("plugins", "matrix", "peft", "quantization", "--json").ok().out)
    assert {"peft": "lora", "quantization": "nf4", "status": "proven", "sentence": None, "cause": None, "source": None} in found
    (refused,) = (each for each in found if (each["peft"], each["quantization"]) == ("dora", "nf4"))
    assert refused["sentence"] and refused["cause"] and refused["source"] == "https://arxiv.org/abs/2402.09353"


@pytest.mark.parametrize(
    ("kinds", "sentence"),
    [
        (["quantization"], "takes two different kinds"),
        (["peft", "peft"], "takes two different kinds"),
        (["peft", "model", "data"], "takes two different kinds"),
        (["nonsense", "peft"], "unknown kind 'nonsense'"),
    ],
)
def test_the_command_refuses_other_than_two(kinds, sentence):
    ended = fw("plugins", "matrix", *kinds)
    assert ended.code == 2 and sentence in ended.err


@pytest.mark.parametrize("seed", range(5))
def test_rows_have_every_pair_that_can_be(seed):
    chance = random.Random(seed)
    parts = {f"part{n}": [f"{n}.{m}" for m in range(chance.randint(2, 6))] for n in range(chance.randint(3, 7))}
    pairs = sorted(map(sorted, all_pairs(parts)))
    impossible = {frozenset(map(tuple, pair)) for pair in chance.sample(pairs, 3)}
    rows = cover(parts, impossible, seed=seed)
    seen = {pair for row in rows for pair in pairs_of(row)}
    assert seen == all_pairs(parts) - impossible
    sizes = sorted(map(len, parts.values()))
    assert sizes[-1] * sizes[-2] - 3 <= len(rows) <= 3 * sizes[-1] * sizes[-2]


def test_what_cannot_be_in_any_row_is_said():
    parts = {"a": ["1"], "b": ["1", "2"], "c": ["1"]}
    with pytest.raises(ValueError, match="no row with"):
        cover(parts, {frozenset([("a", "1"), ("c", "1")])})


def test_statuses():
    training = Runs(
        {"a": ["1", "2"], "b": ["1", "2"]},
        [{"a": "1", "b": "1"}, {"a": "1", "b": "2"}],
        [Refusal(frozenset([("a", "2"), ("b", "1")]), "no")],
    )
    matrix = Matrix(training, Runs({"a": ["1"], "c": ["1"]}, [], []))
    assert matrix.status(("a", "1"), ("b", "2")) == "proven"
    assert matrix.status(("b", "1"), ("a", "2")) == "refused" and matrix.refusal(("b", "1"), ("a", "2")) == "no"
    assert matrix.status(("a", "2"), ("b", "2")) == matrix.status(("a", "1"), ("c", "1")) == "untested"
    assert matrix.status(("b", "1"), ("c", "1")) == matrix.status(("a", "2"), ("c", "1")) == "independent"
