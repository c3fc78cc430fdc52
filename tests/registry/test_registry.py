"""Plugins of other distributions: found without being imported, loaded when named, refused with a reason."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment
from fw import registry, train
from fw.cli import main
from fw.config import load as load_config, overridden
from fw.errors import UserError
from fw.kinds import KINDS
from fw.kinds.optimizer import OptimizerPlugin
from fw.recipe import resolve
from fw.recipe.resolve import KINDS_OF_A_RUN
from fw.registry import discovery

GOOD = '''
"""An optimizer."""
from dataclasses import dataclass
import torch
from fw.kinds.optimizer import OptimizerPlugin, OptimizerSpec

@dataclass
class SignConfig:
    lr: float = 0.01
    """Step size."""

class Sign(OptimizerPlugin):
    """Moves each weight by its gradient's sign."""
    Config = SignConfig
    def spec(self, device):
        return OptimizerSpec(torch.optim.Rprop, self.config.lr)
'''


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Adds distributions to sys.path as pip would: a module and its metadata."""

    def add(distribution: str, module: str, source: str, entry_points: str) -> Path:
        directory = tmp_path / distribution
        info = directory / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        (directory / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(directory))
        discovery._all.cache_clear()
        return directory

    yield add
    monkeypatch.undo()
    discovery._all.cache_clear()


def line(kind: str, name: str) -> registry.Listing:
    return next(found for found in registry.listing(kind) if found.entry.name == name)


def test_first_party_plugins_are_found_by_entry_point_and_all_load():
    for kind in KINDS.values():
        names = [entry.name for entry in registry.entries(kind.name)]
        assert names, f"no plugin of kind {kind.name}"
        for found in registry.listing(kind.name):
            assert found.summary.endswith((".", ")", "GPU.")), found
            if found.available:
                assert registry.load(kind.name, found.entry.name, kind.load_contract()).kind == kind.name


def test_listing_imports_neither_plugins_nor_torch(site):
    site(
        "acme",
        "acme_explodes",
        "import sys\nsys.exit('imported!')\nclass Boom: ...\n",
        "[fw.optimizer]\nboom = acme_explodes:Boom\n",
    )
    program = "import sys; from fw.cli import main; main(['plugins', 'list']); assert 'torch' not in sys.modules, 'torch'"
    env = {**environment(), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "boom" in done.stdout and "acme 1.0" in done.stdout


def test_a_plugin_from_elsewhere_is_listed_and_loaded(site):
    site("acme", "acme_sign", GOOD, "[fw.optimizer]\nsign = acme_sign:Sign\n")
    found = line("optimizer", "sign")
    assert (found.available, found.entry.distribution, found.entry.version, found.api) == (True, "acme", "1.0", 1)
    assert found.summary == "Moves each weight by its gradient's sign."
    assert issubclass(registry.load("optimizer", "sign", OptimizerPlugin), OptimizerPlugin)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(:\n", r"syntax error in .*acme_broken\.py:1"),
        ("raise RuntimeError('no such luck')\n", r"raises in line 1: raise RuntimeError\('no such luck'\)"),
        ("import no_such_package\nclass Sign: ...\n", r"imports no_such_package, which is not installed"),
        ("class Other: ...\n", r"acme_broken has no Sign"),
        (
            "class Sign:\n    packages = {'no_such_package': 'acme[x]'}\n",
            r'needs no_such_package.*pip install "acme\[x\]"',
        ),
        ("class Sign:\n    packages = ['torch']\n", r"'packages' is no mapping"),
        ("import sys\nsys.exit(3)\nclass Sign: ...\n", None),
        ("class Sign:\n    api = 'one'\n", r"was written for api one"),
    ],
)
def test_a_broken_plugin_is_listed_with_its_reason_and_harms_nothing(site, source, reason):
    site("acme", "acme_broken", source, "[fw.optimizer]\nbroken = acme_broken:Sign\n")
    found = line("optimizer", "broken")
    if reason is not None:  # None: it shows only when it is imported
        assert not found.available and re.search(reason, found.problem), found.problem
    with pytest.raises(UserError, match="optimizer 'broken'"):
        registry.load("optimizer", "broken", OptimizerPlugin)
    assert registry.load("optimizer", "adamw", OptimizerPlugin)


def test_a_missing_module_is_listed(site):
    site("acme", "acme_other", "", "[fw.optimizer]\nlost = acme_lost.deep:Lost\n")
    assert "module acme_lost.deep not found; reinstall acme" in line("optimizer", "lost").problem


def test_two_distributions_with_one_name_are_refused_naming_both(site):
    site("acme", "acme_sign", GOOD, "[fw.optimizer]\nsign = acme_sign:Sign\n")
    site("bolt", "bolt_sign", GOOD, "[fw.optimizer]\nsign = bolt_sign:Sign\n")
    assert "acme, bolt" in line("optimizer", "sign").problem
    with pytest.raises(UserError, match=r"registered by acme 1\.0 and bolt 1\.0; uninstall one"):
        registry.load("optimizer", "sign", OptimizerPlugin)


def test_a_first_party_name_cannot_be_taken_silently(site):
    site("acme", "acme_sign", GOOD, "[fw.optimizer]\nadamw = acme_sign:Sign\n")
    with pytest.raises(UserError, match=r"optimizer 'adamw' is registered by acme 1\.0 and fw"):
        registry.load("optimizer", "adamw", OptimizerPlugin)


def test_only_what_is_allowed_is_used(site, monkeypatch):
    site("acme-labs", "acme_sign", GOOD, "[fw.optimizer]\nsign = acme_sign:Sign\nadamw = acme_sign:Sign\n")
    site("bolt", "bolt_boom", "import sys\nsys.exit('imported!')\n", "[fw.optimizer]\nboom = bolt_boom:Boom\nsign = bolt_boom:Boom\n")
    monkeypatch.setenv("FW_PLUGINS", "Acme_Labs, other")
    assert registry.load("optimizer", "sign", OptimizerPlugin).__module__ == "acme_sign"
    with pytest.raises(UserError, match="'boom' is bolt's, whose plugins FW_PLUGINS does not allow here; have 'bolt' added to it"):
        registry.load("optimizer", "boom", OptimizerPlugin)
    assert [found.available for found in registry.listing("optimizer") if found.entry.name == "sign"] == [True, False]
    with pytest.raises(UserError, match=r"optimizer 'adamw' is registered by acme-labs 1\.0 and fw"):
        registry.load("optimizer", "adamw", OptimizerPlugin)
    monkeypatch.setenv("FW_PLUGINS", "")
    assert registry.load("optimizer", "adamw", OptimizerPlugin).__module__.startswith("fw_plugins.")
    assert not line("optimizer", "boom").available and "FW_PLUGINS does not allow" in line("optimizer", "sign").problem


@pytest.mark.parametrize(("api", "remedy"), [(2, "upgrade fw"), (0, "upgrade acme")])
def test_an_api_version_that_is_not_spoken_is_refused(site, api, remedy):
    source = GOOD.replace("    Config = SignConfig", f"    api = {api}\n    Config = SignConfig")
    site("acme", f"acme_api_{api}", source, f"[fw.optimizer]\nsign = acme_api_{api}:Sign\n")
    assert line("optimizer", "sign").api == api and remedy in line("optimizer", "sign").problem
    with pytest.raises(UserError, match=rf"written for api {api} of kind 'optimizer', this fw speaks 1; {remedy}"):
        registry.load("optimizer", "sign", OptimizerPlugin)


def test_a_plugin_of_an_older_api_works_with_a_word_and_is_refused_once_that_is_not_spoken(site, monkeypatch, workspace, capsys):
    site("acme", "acme_old", GOOD, "[fw.optimizer]\nsign = acme_old:Sign\n")
    kind = KINDS["optimizer"]

    def speaks(*versions: int) -> None:
        apis = registry.Apis(versions, {2: "have spec take a mesh", 3: "return a list"})
        for kinds in (KINDS, KINDS_OF_A_RUN):
            monkeypatch.setitem(kinds, "optimizer", dataclasses.replace(kind, apis=apis))

    speaks(1, 2, 3)
    advice = "was written for api 1 of kind 'optimizer', which a later fw will refuse; for api 3: have spec take a mesh; return a list"
    recipe = resolve(overridden(load_config("tiny.yaml"), ["optimizer=sign"]))
    assert recipe.advice == (f"optimizer 'sign' {advice}",)
    main(["plugins", "list", "optimizer"])
    assert advice in capsys.readouterr().out
    assert train("tiny.yaml", "optimizer=sign", "train.max_steps=1").exit_code == 0
    assert f"warning: optimizer 'sign' {advice}" in capsys.readouterr().err

    speaks(2, 3)
    with pytest.raises(UserError, match=r"api 1 of kind 'optimizer', this fw speaks 2 and 3; upgrade acme, or change it: have spec take"):
        resolve(overridden(load_config("tiny.yaml"), ["optimizer=sign"]))


def test_a_class_that_fills_another_contract_is_refused(site):
    site("acme", "acme_sign", GOOD, "[fw.schedule]\nsign = acme_sign:Sign\n")
    with pytest.raises(UserError, match=r"is no SchedulePlugin: derive Sign from fw\.kinds\.schedule\.SchedulePlugin"):
        registry.load("schedule", "sign", KINDS["schedule"].load_contract())


def test_the_command_shows_options_with_types_defaults_and_docs(capsys):
    from fw.cli import main

    assert main(["plugins", "show", "optimizer", "adamw", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    option = {option["name"]: option for option in shown["options"]}["weight_decay"]
    assert option["type"] == "float" and option["default"] == "0.1" and "norms, biases and embeddings" in option["doc"]
    assert main(["plugins", "list", "optimizr"]) == 2
    assert "did you mean 'optimizer'?" in capsys.readouterr().err


def test_every_first_party_option_is_documented():
    from fw.config import options_of

    for kind in KINDS.values():
        for found in registry.listing(kind.name):
            if found.available:
                cls = registry.load(kind.name, found.entry.name, kind.load_contract())
                undocumented = [option.name for option in options_of(cls.Config) if not option.doc]
                assert not undocumented, f"{kind.name} {found.entry.name}: {undocumented}"
