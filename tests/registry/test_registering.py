"""Plugins that are not installed: those of a file that a config names, and those that code registers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

import fw as framework
import serving
from conftest import TINY, column
from fw import registry
from fw.config import Config, load, overridden, to_yaml
from fw.errors import UserError
from fw.kinds.optimizer import OptimizerPlugin, OptimizerSpec
from fw.planning.plan import plan
from fw.recipe.inference import resolve_inference
from fw.recipe.resolve import resolve
from fw.registry import discovery

MINE = '''
"""An optimizer."""
from dataclasses import dataclass
import torch
import fw
from fw.kinds.optimizer import OptimizerPlugin, OptimizerSpec

@dataclass
class MineOptions:
    lr: float = 0.05
    """Step size."""

@fw.register("mine")
class Mine(OptimizerPlugin):
    """Plain gradient descent."""
    Config = MineOptions
    def spec(self, device):
        return OptimizerSpec(torch.optim.SGD, self.config.lr)
'''
CACHE = '''
import fw
from fw_plugins.kv_cache.contiguous import Contiguous

@fw.register("mine")
class Mine(Contiguous):
    """As long as it can become, from the beginning."""
'''
MODEL = '''
from dataclasses import dataclass, replace
from typing import ClassVar
import fw
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.model.reference import ReferenceModel

class MyLlama(Llama):
    hf = replace(Llama.hf, model_type="mine")

@fw.register("mine")
class Mine(ReferenceModel):
    """A Llama of another name."""
    hf_model_types = ("mine",)
    Config = LlamaConfig
    architecture = MyLlama
'''
STEPS = ("train.max_steps=3", "schedule={name: constant}", "train.save_every=3")


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    discovery.REGISTERED.clear()


@pytest.fixture
def mine(workspace: Path) -> Path:
    """``there/mine.py``, and ``there/mine.yaml`` that names it by a path of its own directory."""
    directory = workspace / "there"
    directory.mkdir()
    (directory / "mine.py").write_text(MINE)
    (directory / "mine.yaml").write_text("extends: ../tiny.yaml\nplugins: [./mine.py]\noptimizer: {name: mine, lr: 0.02}\n")
    tiny = {**TINY, "schedule": {"name": "constant"}}
    (workspace / "tiny.yaml").write_text(yaml.safe_dump({key: value for key, value in tiny.items() if key != "optimizer"}))
    return directory


def test_a_file_beside_the_config_trains_on_one_and_on_two_ranks_as_its_twin_does_and_goes_on(mine: Path, fw):
    twin = ("optimizer={name: sgd, lr: 0.02, momentum: 0.0}", "train.run_dir=twin")
    fw("train", "tiny.yaml", *STEPS, *twin).ok()
    fw("train", "there/mine.yaml", *STEPS).ok()
    assert column("run", "loss") == column("twin", "loss")
    assert yaml.safe_load(Path("run/config.yaml").read_text())["plugins"] == [str(mine / "mine.py")]

    fw("train", "there/mine.yaml", *STEPS, "train.run_dir=two", "sharding=ddp", "launch.devices=2").ok()
    assert column("two", "loss") == pytest.approx(column("twin", "loss"), rel=1e-5)

    fw("train", "run/config.yaml", "train.max_steps=5", "resume=auto").ok()
    fw("train", "tiny.yaml", *STEPS, *twin, "train.max_steps=5", "resume=auto").ok()
    assert len(column("run", "loss")) == 5 and column("run", "loss") == column("twin", "loss")


def test_it_is_planned(mine: Path):
    of_mine, of_twin = plan("there/mine.yaml"), plan("tiny.yaml", "optimizer={name: sgd, momentum: 0.0}")
    assert of_mine.largest.allocated_peak == of_twin.largest.allocated_peak


def test_a_path_in_an_override_is_seen_from_the_current_directory(mine: Path, monkeypatch):
    monkeypatch.chdir(mine)
    config = overridden(load("../tiny.yaml"), ["plugins=[mine.py]", "optimizer=mine"])
    assert config.tree["plugins"] == [str(mine / "mine.py")]
    assert resolve(config).tree["optimizer"]["name"] == "mine"


def test_what_a_resolved_config_says_is_found_from_everywhere(mine: Path, tmp_path: Path, monkeypatch):
    resolved = resolve(load("there/mine.yaml"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    Path("resolved.yaml").write_text(to_yaml(resolved.tree))
    assert resolve(load("resolved.yaml")).tree == resolved.tree


def test_a_file_that_has_changed_is_run_again_and_one_that_has_not_is_not(mine: Path):
    counted = mine / "counted"
    file = mine / "mine.py"
    file.write_text(MINE + f"\nopen({str(counted)!r}, 'a').write('x')\n")
    for _ in range(3):
        registry.load_file(file)
    assert counted.read_text() == "x"

    file.write_text(MINE.replace("Plain gradient", "Gradient").replace('"mine"', '"other"'))
    registry.load_file(file)
    assert [found.entry.name for found in registry.listing("optimizer") if found.summary == "Gradient descent."] == ["other"]
    with pytest.raises(UserError, match="unknown optimizer 'mine'"):
        registry.entry_of("optimizer", "mine")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import fw\n\nnobody()\n", r"mine\.py:3 raised NameError: name 'nobody' is not defined"),
        ("import fw\ndef f(:\n", r"mine\.py:2 raised SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)\n", r"mine\.py:2 raised SystemExit: 3"),
        ("import nowhere_at_all\n", r"mine\.py:1 raised ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("import fw\n", r"mine\.py registers no plugin; decorate a class in it with @fw\.register\('NAME'\)"),
        (MINE.replace('"mine"', '"adamw"'), r"optimizer 'adamw' of .*mine\.py has the name of one of fw; give it another"),
        (MINE.replace('"mine"', '"my own"'), r"fw\.register\('my own'\): a name is of letters"),
        (
            'import fw\n@fw.register("x")\nclass X: ...\n',
            r"fw\.register\('x'\): X fills no kind's contract; derive it from one",
        ),
        (MINE.replace("Config = MineOptions", "api = 7"), r"optimizer 'mine' \(.*mine\.py sha256:\w+\) was written for api 7"),
        (MINE.replace("Config = MineOptions", "packages = {'nix': 'nix'}"), r"optimizer 'mine' needs nix, .*: pip install \"nix\""),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_place_and_leaves_nothing(mine: Path, text: str, said: str):
    (mine / "mine.py").write_text(text)
    before = dict(discovery.REGISTERED)
    with pytest.raises(UserError, match=said):
        resolve(load("there/mine.yaml"))
    if "api" not in text and "packages" not in text:
        assert before == discovery.REGISTERED


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("./nowhere.py", r"mine\.yaml:2: plugins: .*there/nowhere\.py: there is no such file"),
        ("[../tiny.yaml]", r"mine\.yaml:2: plugins: .*tiny\.yaml: is no Python file"),
        ("[3]", r"mine\.yaml:2: plugins is a list of Python files, like 'plugins: \[\./mine\.py\]', not 3"),
        ("{name: x}", r"mine\.yaml:2: plugins is a list of Python files"),
    ],
)
def test_what_names_no_file_is_refused(mine: Path, value: str, said: str):
    config = mine / "mine.yaml"
    config.write_text(f"extends: ../tiny.yaml\nplugins: {value}\noptimizer: adamw\n")
    with pytest.raises(UserError, match=said):
        resolve(load(config))


def test_an_override_that_names_no_file_is_said_to_be_it(mine: Path):
    with pytest.raises(UserError, match=r"override plugins\.x=5: plugins is a list of Python files"):
        resolve(overridden(load("tiny.yaml"), ["plugins.x=5", "optimizer=adamw"]))


def test_what_a_kv_cache_declares_of_others_counts_when_generating(workspace: Path):
    (workspace / "cache.py").write_text(f"{CACHE}    conflicts = (fw.registry.Conflicts('quantization', ('nf4',), 'it says so'),)\n")
    asked = overridden(Config("generate", {}, {}), ["plugins=[cache.py]", "kv_cache=mine"])
    resolve_inference(asked)
    with pytest.raises(UserError, match="kv_cache 'mine' does not work with quantization 'nf4', because it says so"):
        resolve_inference(overridden(asked, ["quantization=nf4"]))


def test_where_only_installed_plugins_are_allowed_no_file_is_run(mine: Path, monkeypatch):
    monkeypatch.setenv("FW_PLUGINS", "acme")
    (mine / "mine.py").write_text(f"open({str(mine / 'ran')!r}, 'w')\n{MINE}")
    with pytest.raises(UserError, match=r"FW_PLUGINS is set, so that only installed plugins may be used here; install it as a package"):
        resolve(load("there/mine.yaml"))
    assert not (mine / "ran").exists()


def _here() -> type[OptimizerPlugin]:
    @framework.register("here")
    class Here(OptimizerPlugin):
        """Of this process."""

        def spec(self, device: torch.device) -> OptimizerSpec:
            return OptimizerSpec(torch.optim.SGD, 0.05)

    return Here


def test_what_code_registers_is_known_in_its_process_and_may_be_defined_again(mine: Path):
    _here()
    again = _here()
    config = overridden(load("tiny.yaml"), ["optimizer=here"])
    assert type(resolve(config).optimizer) is again
    assert [found.summary for found in registry.listing("optimizer") if found.entry.name == "here"] == ["Of this process."]

    with pytest.raises(UserError, match=r"optimizer 'here' was registered in this process alone, .*; put it into a file"):
        resolve(overridden(config, ["sharding=ddp", "launch.devices=2"]))


def test_a_config_of_several_files_knows_the_plugins_of_each(mine: Path):
    (mine / "second.py").write_text(MINE.replace('"mine"', '"second"'))
    for name in ("mine", "second"):
        recipe = resolve(overridden(load("there/mine.yaml"), ["plugins=[there/mine.py, there/second.py]", f"optimizer={name}"]))
        assert recipe.tree["optimizer"]["name"] == name
    (mine / "second.py").write_text(MINE)
    with pytest.raises(UserError, match=r"optimizer 'mine' of .*second\.py has the name of one of .*mine\.py"):
        resolve(overridden(load("there/mine.yaml"), ["plugins=[there/mine.py, there/second.py]"]))


def test_a_kv_cache_of_a_file_generates(workspace: Path, small_model, fw):
    model = str(small_model("llama"))
    (workspace / "cache.py").write_text(CACHE)
    asked = ("generate", model, "one two three", "--max-tokens", "8", "--temperature", "0")
    said = [fw(*asked, *more).ok().out for more in (["plugins=[./cache.py]", "kv_cache=mine"], ["kv_cache=contiguous"])]
    assert said[0] == said[1] != ""


def test_a_model_of_a_file_trains_and_what_it_saved_generates(workspace: Path, fw):
    (workspace / "mine.py").write_text(MODEL)
    tiny = {**TINY, "model": {**TINY["model"], "name": "mine"}, "plugins": ["mine.py"]}
    (workspace / "mine.yaml").write_text(yaml.safe_dump(tiny))
    fw("train", "mine.yaml", *STEPS).ok()
    assert json.loads(next(Path("run").rglob("config.json")).read_text())["model_type"] == "mine"

    asked = ("generate", "run", "the model", "--max-tokens", "8")
    assert fw(*asked, "plugins=[mine.py]").ok().out
    without = fw(*asked)
    assert without.code == 2 and "mine" in without.err and "Traceback" not in without.err


def test_a_kv_cache_of_a_file_serves(workspace: Path):
    model = serving.make_model(workspace / "model")
    (workspace / "cache.py").write_text(CACHE)
    (workspace / "server.yaml").write_text(f"plugins: [cache.py]\nkv_cache: mine\nserve: {{model: {model}, name: it}}\n")
    asked = {"model": "it", "prompt": "one two", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    said = []
    for words in (["server.yaml"], [str(model), "kv_cache=contiguous", "serve.name=it"]):
        with serving.serving(*words) as server, server.client() as client:
            said.append(client.post("/v1/completions", json=asked).raise_for_status().json()["choices"])
    assert said[0] == said[1]


def test_a_file_that_cannot_be_used_ends_the_server_with_its_sentence(workspace: Path, fw):
    (workspace / "bad.py").write_text("x(\n")
    ended = fw("serve", str(serving.make_model(workspace / "model")), "plugins=[bad.py]", "--port", "0")
    assert ended.code == 2 and "override plugins=[bad.py]: plugins: " in ended.err and "bad.py:1 raised SyntaxError" in ended.err
    assert "Traceback" not in ended.err
