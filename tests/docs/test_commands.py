"""What the documents print is what fw understands: every command line and every piece of a config, and what fw says of mistakes."""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import fw
import tokens
from conftest import REPOSITORY, fw as run_fw
from fw import config as configuration
from fw.cli import parsed
from fw.config import Config, overridden
from fw.config.serve import ServeSection
from fw.recipe import World, resolve
from fw.recipe.inference import resolve_inference
from models.architectures import VOCABULARY, save

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
QUICKSTART = "configs/quickstart.yaml"
MODELS = ("runs/quickstart", "runs/poems", "path/to/model", "my/model", "base", "shallow", "DIRECTORY", "student", "teacher")
"""What pages call a model directory."""
_BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


class Command(NamedTuple):
    """A line that a page tells to type, and what it shows then."""

    page: str
    words: list[str]
    shown: list[str]


def _blocks(page: Path, *languages: str) -> list[str]:
    return [text for language, text in _BLOCK.findall(page.read_text()) if language in languages]


def _commands(page: Path) -> list[Command]:
    found: list[Command] = []
    for text in _blocks(page, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.strip().startswith("fw "):
                found.append(Command(page.name, shlex.split(line, comments=True)[1:], []))
    for text in _blocks(page, ""):
        for line in text.replace("\\\n", " ").splitlines():
            if line.strip().startswith("$ fw "):
                plain = re.split(r" > ?\S+| \|\| ", line.strip())[0]
                found.append(Command(page.name, shlex.split(plain)[2:], []))
            elif found and found[-1].page == page.name and line.strip():
                found[-1].shown.append(line.strip())
    return found


COMMANDS = [command for page in PAGES for command in _commands(page)]
REFUSED = [c for c in COMMANDS if any(line.startswith("fw: error: ") for line in c.shown) and any("configs/" in word for word in c.words)]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where configs and models are that pages name."""
    place = tmp_path_factory.mktemp("desk")
    (place / "configs").symlink_to(REPOSITORY / "configs")
    model = place / "model"
    save("llama", model)
    tokens.save(model, VOCABULARY)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}")
    (model / "checkpoints").mkdir()
    (model / "checkpoints" / "latest").symlink_to("..")
    for name in MODELS:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(model)
    chat = '{"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}'
    (place / "chats.jsonl").write_text("\n".join([chat, chat, chat.replace('"role": "user",', '"role":"user"'), ""]))
    return place


@pytest.fixture(autouse=True)
def at_the_desk(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 80 and {"README.md", "memory.md", "launch.md"} <= {command.page for command in COMMANDS}
    assert len(REFUSED) >= 4


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page} {shlex.join(command.words)}")
def test_every_command_is_understood(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """Its options, and what it overrides: of a config that is not here, or of none, against the quickstart's."""
    options = vars(parsed(command.words))
    overrides = options.get("overrides", [])
    if command in REFUSED or any(line.startswith("fw: error: ") for line in command.shown):
        return
    if "config" in options and options["config"] and options["verb"] != "compare":
        if options["config"].startswith("configs/"):
            assert Path(options["config"]).is_file()
        config = options["config"] if Path(options["config"]).is_file() else QUICKSTART
        if (given := Path(options["config"])).suffix == ".yaml":
            launched = [f"launcher={options['launcher']}"] if options["verb"] == "launch" else []
            resolve(configuration.load(config, [*launched, *overrides]), World(), starts=False)
        else:
            assert given.exists() and options["verb"] == "plan"
            resolve_inference(overridden(Config("plan", {}, {}), overrides))
    elif overrides and not any(word.startswith("plugins=") for word in overrides):
        serving = [word for word in overrides if word.startswith("serve.")]
        assert all(word.removeprefix("serve.").partition("=")[0] in ServeSection.__dataclass_fields__ for word in serving)
        resolve_inference(overridden(Config(options["verb"], {}, {}), [word for word in overrides if word not in serving]))


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: f"{command.page} {shlex.join(command.words)}")
def test_what_is_refused_is_refused_in_these_words(command: Command) -> None:
    done = run_fw(*command.words)
    shown = next(line for line in command.shown if line.startswith("fw: error: "))
    assert done.code == 2 and shown.removesuffix("…)") in " ".join(done.err.split()), done.err


class Piece(NamedTuple):
    """A section as a page shows it, and those beside it that no other line of the block is an alternative to."""

    page: str
    section: str
    text: str
    beside: list[str]


def _pieces(page: Path) -> list[Piece]:
    found = []
    for block in _blocks(page, "yaml"):
        lines = [(section, text.strip()) for section, text in re.findall(r"^(\w+): (.*?)(?: +#.*)?$", block, re.MULTILINE)]
        once = {section for section, count in Counter(section for section, _ in lines).items() if count == 1}
        for section, text in lines:
            if "…" not in text:
                beside = [f"{other}={value}" for other, value in lines if other in once and other != section]
                found.append(Piece(page.name, section, text, beside))
    return found


PIECES = [piece for page in PAGES for piece in _pieces(page)]


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: f"{piece.page} {piece.section}: {piece.text}")
def test_every_piece_of_a_config_is_understood(piece: Piece) -> None:
    section, text = piece.section, piece.text
    given: Any = yaml.safe_load(text)
    if section == "serve":
        assert set(given) <= set(ServeSection.__dataclass_fields__)
    elif section == "inference":
        resolve_inference(overridden(Config("serve", {}, {}), [f"{section}={text}"]))
    else:
        needed = ["train.gradient_clip_norm=0", "train.micro_batch_size=8"] if "in_backward" in text else []
        begins = "params: nvme" in text or any("${model.path}" in each for each in (text, *piece.beside))
        needed += ["model={name: auto, path: base}"] if begins else []
        resolve(configuration.load(QUICKSTART, [*needed, *piece.beside, f"{section}={text}"]), World(), starts=False)


PYTHON = [(page.name, text) for page in PAGES for text in _blocks(page, "python")]


@pytest.mark.parametrize(("page", "text"), PYTHON, ids=[f"{page} {text.splitlines()[0]}" for page, text in PYTHON])
def test_what_is_used_of_fw_in_python_is_there(page: str, text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fw":
            assert hasattr(fw, node.attr), f"fw.{node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("fw", "fw_plugins"):
            module = __import__(node.module, fromlist=[name.name for name in node.names])
            assert all(hasattr(module, name.name) for name in node.names)
