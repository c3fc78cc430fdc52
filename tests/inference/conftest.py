"""A small model with a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

import tokens
from models.architectures import VOCABULARY, save

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}.{{ message.content }}!{% endfor %}{% if add_generation_prompt %}a.{% endif %}"
)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a Llama that has learnt nothing."""
    place = tmp_path_factory.mktemp("model")
    save("llama", place)
    tokens.save(place, VOCABULARY, TEMPLATE)
    return place
