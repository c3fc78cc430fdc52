"""The files a tokenizer consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fw.errors import UserError

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"

_NAMES = (TOKENIZER, CONFIG, SPECIAL_TOKENS_MAP, ADDED_TOKENS, TEMPLATE)
_OTHER_FORMATS = ("tokenizer.model", "spm.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")


class ModelHint(NamedTuple):
    """What a model's ``config.json`` beside the tokenizer says about it; both are empty where there is none."""

    model_type: str = ""
    tokenizer_class: str = ""


def read_files(directory: Path) -> dict[str, bytes]:
    """The content of a tokenizer's files, by their names relative to ``directory``.

    Raises:
        UserError: there is no ``tokenizer.json``, or a file cannot be read.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give one that holds a {TOKENIZER}")
    if not (directory / TOKENIZER).is_file():
        found = [name for name in _OTHER_FORMATS if (directory / name).is_file()]
        if found:
            raise UserError(
                f"{directory}: there is {found[0]} and no {TOKENIZER}, the only format read here;"
                " convert it: AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes one"
            )
        raise UserError(f"{directory}: there is no {TOKENIZER}; copy the tokenizer's files there or give another directory")
    names = [name for name in _NAMES if (directory / name).is_file()]
    names += sorted(f"{TEMPLATES}/{file.name}" for file in (directory / TEMPLATES).glob("*.jinja"))
    try:
        return {name: (directory / name).read_bytes() for name in names}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; make it readable or give another directory") from None


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Write what :func:`read_files` read."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def read_hint(directory: Path) -> ModelHint:
    """The part of ``config.json`` that AutoTokenizer looks at."""
    file = directory / "config.json"
    if not file.is_file():
        return ModelHint()
    content = parse(file.read_bytes(), str(file))
    return ModelHint(*(value if isinstance(value := content.get(key), str) else "" for key in ModelHint._fields))


def text_of(content: bytes, place: str) -> str:
    """UTF-8 text of a file."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}; save it as UTF-8") from None


def parse(content: bytes, place: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text_of(content, place))
    except json.JSONDecodeError as error:
        raise UserError(f"{place}, line {error.lineno}: {error.msg}; copy the file anew") from None
    if not isinstance(value, dict):
        raise UserError(f"{place}: it holds a {type(value).__name__}, not an object; copy the file anew")
    return value
