"""Layers, overrides and origins."""

from __future__ import annotations

from pathlib import Path

import pytest

from fw.config import load
from fw.config.origin import override
from fw.config.yaml_source import parse, parse_value
from fw.errors import UserError


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_yaml_scalars_are_those_of_yaml_1_2():
    tree, _ = parse("a: on\nb: yes\nc: true\nd: 1e-3\ne: 010\nf: ~\ng: 0x10\nh: 1_000\ni: .inf\n", "t.yaml")
    assert tree == {
        "a": "on",
        "b": "yes",
        "c": True,
        "d": 1e-3,
        "e": 10,
        "f": None,
        "g": 16,
        "h": 1000,
        "i": float("inf"),
    }


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("3e-4", 3e-4), ("off", "off"), ("[a, 1]", ["a", 1]), ("", None), ("a: [", "a: [")])
def test_override_values_follow_the_same_rules(text, value):
    assert parse_value(text, override(f"key={text}"))[0] == value


def test_later_layers_win_and_lists_replace(write):
    write("base.yaml", "train: {max_steps: 1, seed: 2}\nlogger: [csv, tensorboard]\n")
    top = write("top.yaml", "extends: base.yaml\ntrain: {max_steps: 3}\nlogger: [csv]\n")
    config = load(top, ["train.seed=4"])
    assert config.tree == {"train": {"max_steps": 3, "seed": 4}, "logger": ["csv"]}
    assert str(config.origin(("train", "max_steps"))).endswith("top.yaml:2")
    assert str(config.origin(("train", "seed"))) == "override train.seed=4"


def test_extends_takes_a_list_relative_to_the_file(write, tmp_path, monkeypatch):
    write("a.yaml", "train: {seed: 1, max_steps: 1}\n")
    write("b.yaml", "train: {seed: 2}\n")
    top = write("top.yaml", "extends: [a.yaml, b.yaml]\n")
    monkeypatch.chdir("/")
    assert load(top).tree == {"train": {"seed": 2, "max_steps": 1}}


def test_a_cycle_is_refused_with_its_way(write):
    write("a.yaml", "extends: b.yaml\n")
    path = write("b.yaml", "extends: a.yaml\n")
    with pytest.raises(UserError, match=r"circle: b\.yaml → a\.yaml → b\.yaml"):
        load(path)


@pytest.mark.parametrize("section", ["optimizer: adamw", "optimizer: {name: adamw}", "optimizer:\n  name: adamw\n  lr: 1"])
def test_an_option_merges_into_either_form(write, section):
    config = load(write("c.yaml", section), ["optimizer.lr=2"])
    assert config.tree["optimizer"] == {"name": "adamw", "lr": 2}
    assert str(config.origin(("optimizer", "name"))).endswith(("c.yaml:1", "c.yaml:2"))


def test_naming_a_plugin_replaces_the_whole_section(write):
    path = write("c.yaml", "optimizer: {name: adamw, betas: [0.9, 0.95]}")
    assert load(path, ["optimizer=sgd"]).tree["optimizer"] == "sgd"
    assert load(path, ["optimizer=adamw"]).tree["optimizer"] == "adamw"
    assert load(path, ["optimizer.name=sgd"]).tree["optimizer"] == {"name": "sgd"}
    assert load(path, ["optimizer=sgd", "optimizer.lr=1"]).tree["optimizer"] == {"name": "sgd", "lr": 1}
    assert load(path, ["optimizer={name: sgd, lr: 2}"]).tree["optimizer"] == {"name": "sgd", "lr": 2}


def test_an_extending_file_that_names_another_plugin_drops_the_options(write):
    write("base.yaml", "optimizer: {name: adamw, betas: [0.9, 0.95]}\n")
    top = write("top.yaml", "extends: base.yaml\noptimizer: {name: sgd, lr: 1}\n")
    config = load(top)
    assert config.tree["optimizer"] == {"name": "sgd", "lr": 1}
    assert ("optimizer", "betas") not in config.origins


def test_an_item_of_a_list_is_picked_by_number_or_name(write):
    path = write("c.yaml", "logger: [csv, wandb]")
    for item in ("logger.1.project=x", "logger.wandb.project=x"):
        assert load(path, [item]).tree["logger"] == ["csv", {"name": "wandb", "project": "x"}]
    with pytest.raises(UserError, match="nothing there has options"):
        load(path, ["logger.0.a=1", "logger.0.a.b=2"])
    with pytest.raises(UserError, match="pick one of them"):
        load(path, ["logger.mlflow.project=x"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", r"c\.yaml:2: 'a' is given twice \(first in line 1\)"),
        ("a: [1\n", r"c\.yaml:\d: not valid YAML"),
        ("a: \x07\n", r"c\.yaml: not valid YAML"),
        ("a: !!int abc\n", r"c\.yaml: not valid YAML"),
        ("a: &x [*x]\n", r"c\.yaml"),
        ("- a\n", r"c\.yaml:1: a config is a mapping"),
        ("extends: 5\n", r"c\.yaml:1: 'extends' takes a file or a list of files, not 5"),
        ("extends: nowhere.yaml\n", r"c\.yaml:1: extends 'nowhere.yaml', which is no file"),
    ],
)
def test_malformed_files_are_refused_with_their_line(write, text, message):
    with pytest.raises(UserError, match=message):
        load(write("c.yaml", text))


def test_a_missing_file_and_a_malformed_override(write):
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such file"):
        load("nowhere.yaml")
    with pytest.raises(UserError, match="not of the form key=value"):
        load(write("c.yaml", ""), ["train.max_steps"])


def test_keys_are_text_and_an_empty_extends_extends_nothing(write):
    assert load(write("c.yaml", "extends:\n7: {true: 1}\n")).tree == {"7": {"True": 1}}


def test_a_layer_that_says_a_nested_section_is_something_else_starts_it_afresh(tmp_path):
    (tmp_path / "base.yaml").write_text("model: {name: m, rope_scaling: {rope_type: llama3, factor: 8, low_freq_factor: 1}}\n")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\nmodel: {rope_scaling: {rope_type: linear, factor: 3}}\n")
    assert load(tmp_path / "child.yaml").tree["model"]["rope_scaling"] == {"rope_type": "linear", "factor": 3}
    merged = load(tmp_path / "base.yaml", ["model.rope_scaling.factor=2"]).tree["model"]["rope_scaling"]
    assert merged == {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1}
