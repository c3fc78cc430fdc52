"""What the plugins of the reference architectures share, and how a published shape becomes one of them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from fw.api import AttentionPlugin, CausalLM, ModelPlugin
from fw_models.hf_config import HFNames, read

C = TypeVar("C")


class ReferenceModel(ModelPlugin):
    """Builds ``architecture`` from a configuration, which may come from a ``config.json``."""

    architecture: ClassVar[Any]
    """A class of :mod:`fw_models`, built from configuration, vocabulary size, sequence length and attention."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], changes: Mapping[str, Any]) -> ReferenceModel:
        """As the contract says."""
        names: HFNames = cls.architecture.hf
        return cls(read(cls.Config, names, raw, changes))

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding, or None to take the tokenizer's."""
        size: int | None = self.config.vocab_size
        return size

    def build(self, vocab_size: int, sequence_length: int, attention: AttentionPlugin) -> CausalLM:
        """The model on the current device."""
        model: CausalLM = self.architecture(self.config, vocab_size, sequence_length, attention)
        return model


def preset(base: type[C], **values: Any) -> type[C]:
    """``base`` with other defaults: a published shape, every field of which can still be overridden."""
    hints = typing.get_type_hints(base)
    unknown = set(values) - set(hints)
    assert not unknown, f"{base.__name__} has no {unknown}"
    made = []
    for name, value in values.items():
        mutable = isinstance(value, list) or dataclasses.is_dataclass(value)
        default = dataclasses.field(default_factory=lambda v=value: v) if mutable else dataclasses.field(default=value)  # type: ignore[misc]
        made.append((name, hints[name], default))
    return dataclasses.make_dataclass(base.__name__, made, bases=(base,))
