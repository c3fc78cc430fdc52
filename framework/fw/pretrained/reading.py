"""Which model plugin reads a directory's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fw import registry
from fw.checkpointing.quantized_files import quantization_for
from fw.errors import UserError, did_you_mean
from fw.kinds import plugin_class
from fw.kinds.model import ModelPlugin
from fw.kinds.peft import PeftPlugin
from fw.locate import ADAPTER_CONFIG
from fw.pretrained.directory import read_adapter_config


def plugin_for(directory: Path, config: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> ModelPlugin:
    """The plugin that declares the config's ``model_type``, configured as the file says, with ``changes`` laid over its fields.

    Raises:
        UserError: no plugin or several declare it, or it has a field that cannot be honoured.
    """
    model_type = config.get("model_type")
    place = directory / "config.json"
    if not isinstance(model_type, str):
        raise UserError(f"{place} has no model_type")
    known = _model_types()
    names = known.get(model_type, [])
    if not names:
        readable = ", ".join(sorted(known))
        raise UserError(
            f"{place}: no model plugin reads model_type '{model_type}'{did_you_mean(model_type, known)} (there are: {readable});"
            f" with transformers installed, model: {{name: hf, path: {directory}}} trains it by its own code"
        )
    if len(names) > 1:
        raise UserError(f"{place}: several model plugins read model_type '{model_type}': {', '.join(names)}; uninstall all but one")
    cls = plugin_class(ModelPlugin, names[0])
    if "quantization_config" in config:
        quantization_for(directory)  # who opens the weights knows them; here a method that nobody knows is refused
    config = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        return cls.from_hf(config, changes or {})
    except UserError as error:
        raise UserError(f"{place}: {str(error).removeprefix('config.json: ')}") from None


def plugin_name(config: Mapping[str, Any]) -> str | None:
    """The name of the plugin that reads this architecture; None where there is none, or several."""
    names = _model_types().get(str(config.get("model_type")), [])
    return names[0] if len(names) == 1 else None


def peft_for(directory: Path) -> PeftPlugin:
    """The plugin that reads the adapter of a directory, configured as its adapter_config.json says.

    Raises:
        UserError: it is no adapter's directory, no plugin or several declare its ``peft_type``, or a field cannot be honoured.
    """
    config = read_adapter_config(directory)
    peft_type, place = config.get("peft_type"), directory / ADAPTER_CONFIG
    known = registry.declared("peft", "peft_types")
    names = known.get(str(peft_type), [])
    if len(names) != 1:
        which = f"several peft plugins read it: {', '.join(names)}; uninstall all but one" if names else f"there are: {', '.join(known)}"
        raise UserError(f"{place}: peft_type '{peft_type}' has no one plugin ({which})")
    cls = plugin_class(PeftPlugin, names[0])
    try:
        return cls.from_peft(config)
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{place}: {error}") from None


def _model_types() -> dict[str, list[str]]:
    return registry.declared("model", "hf_model_types")
