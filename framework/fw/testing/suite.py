"""What holds for every plugin, whatever its kind."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fw import registry
from fw.config import options_of
from fw.errors import UserError
from fw.kinds import KINDS, plugin_class
from fw.registry import Entry, Plugin
from fw.registry.inspection import missing_packages
from fw.testing.building import build
from fw.testing.probe import Probe
from fw.testing.running import TINY, Runs, merged

_PUBLIC = ("fw", "fw.api", "fw.testing")
_PICKLING = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
_TORCH_PICKLING = {"load", "save"}


class PluginSuite:
    """Tests of a plugin; a class of one's own derives from that of the plugin's kind and names the plugin::

        class TestMine(fw.testing.OptimizerSuite):
            plugin = Mine

    The plugin is found by its entry point, or is what :func:`fw.testing.from_file` gives.

    Attributes:
        plugin: the class.
        options: with which it is built and run, where its defaults do not do.
        bad_options: each a set of options that must be refused, the one at fault first.
        tree: what else a run of it needs, as sections of a config.
        probes: of each capability that a plugin of the kind may have, how it shows.
        capabilities: those that this plugin has; all, unless a class says otherwise. What it has not must be refused before a run begins.
    """

    plugin: ClassVar[type[Plugin]]
    options: ClassVar[Mapping[str, Any]] = {}
    bad_options: ClassVar[Sequence[Mapping[str, Any]]] = ()
    tree: ClassVar[Mapping[str, Any]] = {}
    probes: ClassVar[Mapping[str, Probe]] = {}
    capabilities: ClassVar[Collection[str] | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each of the options to refuse, and for each capability there is."""
        cls = metafunc.cls
        if "bad" in metafunc.fixturenames:
            metafunc.parametrize("bad", cls.bad_options, ids=lambda bad: ", ".join(f"{key}={value}" for key, value in bad.items()))
        if "capability" in metafunc.fixturenames:
            metafunc.parametrize("capability", list(cls.probes))

    @cached_property
    def entry(self) -> Entry:
        """The plugin as it is registered."""
        target = f"{self.plugin.__module__}:{self.plugin.__qualname__}"
        for entry in registry.entries(self.plugin.kind):
            if entry.target.partition("[")[0].strip() == target:
                return entry
        for entry in registry.entries(self.plugin.kind):  # under the name of a module that imports it
            try:
                if plugin_class(KINDS[self.plugin.kind].load_contract(), entry.name) is self.plugin:
                    return entry
            except UserError:
                continue
        pytest.fail(
            f'{target} is not registered: name it in pyproject.toml under [project.entry-points."fw.{self.plugin.kind}"] and install the'
            " package, or take it by fw.testing.from_file"
        )

    @pytest.fixture(autouse=True)
    def _usable(self) -> None:
        """What a plugin needs and this machine lacks is no fault of the plugin's."""
        line = registry.inspect(self.entry, KINDS[self.plugin.kind].apis)
        if missing := missing_packages(self.plugin.packages):
            pytest.skip(missing)
        assert line.available, line.problem

    @property
    def choice(self) -> dict[str, Any]:
        """The plugin's section in a config."""
        return {"name": self.entry.name, **self.options}

    @property
    def sections(self) -> dict[str, Any]:
        """What a config needs to use the plugin."""
        chosen: Any = [self.choice, "csv"] if KINDS[self.plugin.kind].many else self.choice
        found = merged(self.tree, {self.plugin.kind: chosen})
        if Path(self.entry.distribution).suffix == ".py":
            found["plugins"] = [self.entry.distribution]
        return found

    @pytest.fixture
    def runs(self, tmp_path: Path) -> Runs:
        """Of a small model, without the plugin."""
        return Runs(tmp_path, TINY)

    def make(self, **changes: Any) -> Any:
        """The plugin as a config builds it, of :attr:`options` and ``changes``.

        Raises:
            UserError: as a config's user is told.
        """
        return build(self.plugin.kind, {**self.choice, **changes})

    def test_it_fills_the_contract_and_says_what_it_is(self) -> None:
        contract = KINDS[self.plugin.kind].load_contract()
        assert issubclass(self.plugin, contract) and not inspect.isabstract(self.plugin)
        summary = registry.inspect(self.entry, KINDS[self.plugin.kind].apis).summary
        assert summary, "its docstring's first line is what fw plugins list prints"
        made = self.make()
        assert type(made) is self.plugin and isinstance(made.config, self.plugin.Config)

    def test_every_option_has_a_type_and_a_sentence(self) -> None:
        for field in options_of(self.plugin.Config):
            name = f"{self.plugin.Config.__name__}.{field.name}"
            assert field.type and field.doc, f"{name} wants a type, and a docstring beneath it"

    def test_no_option_is_called_as_the_plugin_is(self) -> None:
        names = [field.name for field in options_of(self.plugin.Config)]
        assert "name" not in names, "in a config, 'name' is the plugin's: an option of that name could not be given"

    def test_an_option_that_is_none_is_refused_by_name(self) -> None:
        with pytest.raises(UserError, match="no_such_option"):
            self.make(no_such_option=1)

    def test_a_value_of_another_type_is_refused_by_name(self) -> None:
        fields = [field for field in options_of(self.plugin.Config) if field.type.startswith(("int", "float", "bool"))]
        for field in fields:
            with pytest.raises(UserError, match=field.name):
                self.make(**{field.name: "no such value"})

    def test_bad_options_are_refused_by_name(self, bad: Mapping[str, Any]) -> None:
        with pytest.raises(UserError, match=next(iter(bad))):
            self.make(**bad)

    def test_options_mean_the_same_written_down(self) -> None:
        made = self.make().config
        written = json.loads(json.dumps(dataclasses.asdict(made), default=str))
        assert self.make(**written).config == made

    def test_it_uses_of_fw_what_is_public(self) -> None:
        for path, module in _imports(self.sources()):
            own = module.partition(".")[0] != "fw"
            public = module in _PUBLIC or module.startswith(("fw.api.", "fw.testing."))
            assert own or public, f"{path} imports {module}, which may change without a word; fw.api is what stays"

    def test_it_pickles_nothing(self) -> None:
        for path, module in _imports(self.sources()):
            assert module.partition(".")[0] not in _PICKLING, f"{path} imports {module}: state is tensors and JSON"
        for file in self.sources():
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                    assert node.attr not in _TORCH_PICKLING, f"{file}:{node.lineno} has torch.{node.attr}, which pickles"

    def sources(self) -> list[Path]:
        """Files of the plugin: its module, and where that is a package, all of it."""
        file = Path(inspect.getsourcefile(self.plugin) or "")
        return sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]


def _imports(files: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """``file:line`` and the module, of every import."""
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((f"{file}:{node.lineno}", alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # `from fw import config` is an import of fw.config, `from fw import train` one of fw
                names = [f"fw.{alias.name}" for alias in node.names] if node.module == "fw" else []
                private = [name for name in names if name.removeprefix("fw.") not in _top_level() and name not in _PUBLIC]
                yield from ((f"{file}:{node.lineno}", name) for name in [*private, node.module])


def _top_level() -> Sequence[str]:
    import fw

    return fw.__all__
