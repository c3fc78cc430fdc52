"""A small model with a tokenizer and a chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fw
import tokens
from fw.inference.results import Result
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


@pytest.fixture(scope="module")
def llm(directory: Path) -> fw.LLM:
    """It, by the Python interface."""
    return fw.LLM(directory, dtype="fp32")


@pytest.fixture(scope="session")
def alone() -> Callable[..., Result]:
    """The likeliest answer of a model to one prompt."""

    def answer(llm: fw.LLM, prompt: Any, **settings: Any) -> Result:
        (result,) = llm.generate(prompt, **{"temperature": 0, "max_tokens": 12, **settings})
        return result

    return answer
