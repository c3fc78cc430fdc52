"""What `tools/newcomer` types is what README and the first page say, in their order."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from conftest import REPOSITORY

SPEC = importlib.util.spec_from_file_location("newcomer", REPOSITORY / "tools" / "newcomer.py")
assert SPEC is not None and SPEC.loader is not None
newcomer = importlib.util.module_from_spec(SPEC)
sys.modules["newcomer"] = newcomer
SPEC.loader.exec_module(newcomer)


def test_it_types_the_page_from_quickstart_to_an_answer() -> None:
    first = newcomer.first_of_readme((REPOSITORY / "README.md").read_text())
    assert first == ["./tools/quickstart"]
    blocks = newcomer.BLOCK.findall((REPOSITORY / "docs/index.md").read_text())
    typed = [command for language, text in blocks if language == "bash" for command in newcomer.commands(text)]
    verbs = [command.split()[1] for command in typed if command.startswith("fw ")]
    assert verbs == ["runs", "generate", "train", "compare", "plan", "plan", "serve"]
    assert any(command.startswith("fw train") and "notes/*.md" in command and "lora" in command for command in typed)
    assert [language for language, _ in blocks][-1] == "python" and "OpenAI" in blocks[-1][1]
    assert not any(" #" in command or "\n" in command for command in typed)


@pytest.mark.parametrize(("seconds", "said", "code"), [(100.0, "an answer", 0), (100.0, " \n", 1), (newcomer.LIMIT + 1.0, "an answer", 1)])
def test_it_fails_where_it_took_too_long_or_nothing_was_said(seconds: float, said: str, code: int) -> None:
    assert newcomer.report([("(installing)", 5000.0, True), ("fw train", seconds, False)], said) == code
