"""What holds for all of fw's own plugins, whether or not a suite runs them."""

from __future__ import annotations

import importlib.metadata

import pytest

from fw import registry, testing
from fw.kinds import KINDS, plugin_class

OWN = [
    pytest.param(point.group.removeprefix("fw."), point.name, id=f"{point.group.removeprefix('fw.')} {point.name}")
    for point in importlib.metadata.distribution("fw").entry_points
    if point.group.startswith("fw.")
]


@pytest.mark.parametrize("kind, name", OWN)
def test_all_fill_their_contract_by_what_is_public(kind: str, name: str) -> None:
    (entry,) = registry.entries(kind, name)
    if not (listed := registry.inspect(entry, KINDS[kind].apis)).available:
        pytest.skip(listed.problem)
    cls = plugin_class(KINDS[kind].load_contract(), name)
    suite = type("Suite", (testing.PluginSuite,), {"plugin": cls})()
    suite.test_every_option_has_a_type_and_a_sentence()
    suite.test_it_uses_of_fw_what_is_public()
    suite.test_no_option_is_called_as_the_plugin_is()
    if not cls.__module__.startswith(("fw_plugins.logger", "fw_plugins.sharding.zero")):  # whose packages need not be here
        suite.test_it_pickles_nothing()
    assert suite.entry.name
