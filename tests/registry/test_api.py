"""fw.api: every name is there, is what type checkers are told, and brings in no more than it needs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fw.api
import fw.kinds


def told() -> dict[str, str]:
    """Names by the module that type checkers are sent to."""
    tree = ast.parse(Path(fw.api.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def test_type_checkers_and_python_are_told_the_same():
    assert told() == fw.api._FROM
    for name, module in told().items():
        assert getattr(fw.api, name) is getattr(importlib.import_module(module), name)
    assert dir(fw.api) == fw.api.__all__ and set(fw.api.__all__) == set(told())
    with pytest.raises(AttributeError, match="has no attribute 'Recipe'"):
        fw.api.Recipe  # noqa: B018


def test_every_contract_is_there_and_says_what_it_is():
    for kind in fw.kinds.KINDS.values():
        contract = kind.load_contract()
        assert getattr(fw.api, contract.__name__) is contract and contract.__doc__


@pytest.mark.parametrize("name", ["checkpointing", "kernels", "launching"])
def test_parts_give_what_they_list(name):
    part = importlib.import_module(f"fw.api.{name}")
    assert all(hasattr(part, each) for each in part.__all__)


def test_a_launcher_needs_no_torch():
    """In a process that has imported nothing: `-B` keeps tests from forking one that has."""
    program = "import sys, fw.api.launching; from fw.api import LauncherPlugin, Plugin, UserError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-B", "-c", program], check=False).returncode == 0
