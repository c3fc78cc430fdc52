"""config.json in and out: names of fields, what transformers takes where one is absent, what is honoured and what is refused."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypeVar

from fw.api import UserError
from fw_models.layers.rope import RopeScaling

C = TypeVar("C")
Fields = dict[str, Any]


def one_rope(fields: Fields) -> Fields:
    """``rope_parameters`` (transformers 5) as ``rope_theta`` and ``rope_scaling`` (before it); the older spelling wins, as there."""
    fields = dict(fields)
    new, old = fields.pop("rope_parameters", None), fields.pop("rope_scaling", None)
    if new is None and old is None:
        return fields
    given = dict(new if old is None else old)
    theta = given.pop("rope_theta", None)
    return {**fields, **({} if theta is None else {"rope_theta": theta}), "rope_scaling": given}


def _unchanged(fields: Fields) -> Fields:
    return fields


@dataclass(frozen=True)
class HFNames:
    """How an architecture's ``config.json`` reads.

    Attributes:
        model_type, architecture: as in the file.
        defaults: what transformers takes for absent fields, except None and what the configuration here takes too.
        only: fields with the one value that is honoured; any other is refused.
        canonical: brings what can be spelt in several ways into one, for the file's fields and for changes to them alike.
        reading: then, once changes are laid over, into the fields of the configuration here, before they are checked.
        writing: the other way.
        derived: fields of the file that no longer hold once one of these others is changed.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    reading: Callable[[Fields], Fields] = _unchanged
    writing: Callable[[Fields], Fields] = _unchanged
    canonical: Callable[[Fields], Fields] = one_rope
    derived: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


# fmt: off
NO_EFFECT = frozenset((
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "_name_or_path", "_commit_hash",
    "_attn_implementation_autoset", "attn_implementation", "auto_map", "return_dict", "output_hidden_states", "output_attentions",
    "torchscript", "use_bfloat16", "finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "tokenizer_class",
    "task_specific_params", "prefix", "gradient_checkpointing", "cache_implementation", "keys_to_ignore_at_inference", "sep_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "max_length", "min_length", "do_sample", "early_stopping",
    "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "_attn_implementation", "_num_labels", "n_special", "predict_special_tokens", "output_past",
    "is_llama_config", "transformers.js_config", "max_sequence_length", "unsloth_fixed", "unsloth_version", "pretraining_tp",
    "_attn_implementation_internal",
))
# fmt: on
"""Fields that say nothing about what a causal language model computes: where it came from, how transformers is to return things,
generation settings, which are generation_config.json's, and what published files repeat or carry along."""

ONLY: dict[str, Any] = {
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({},),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "qkv_bias": (False,),
    "shared_expert_intermediate_size": (0,),
}
"""Fields that every architecture may carry, and the values that leave a causal language model as it is."""


def read(cls: type[C], names: HFNames, raw: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> C:
    """A configuration from a ``config.json``. An absent field has transformers' default; null is none.

    Args:
        changes: fields to lay over those of the file, spelt as they may be there.

    Raises:
        UserError: fields that cannot be honoured, all by name; wrong types and impossible shapes.
    """
    changes = dict(changes or {})
    if idle := sorted(set(changes) & NO_EFFECT):
        raise UserError(f"model.fields: {', '.join(idle)} changes nothing that a model computes; leave it out")
    kept = _canonical(names, {key: value for key, value in raw.items() if key not in NO_EFFECT})
    over = _canonical(names, changes)
    for stale, causes in names.derived.items():
        if stale not in over and any(cause in over for cause in causes):
            kept.pop(stale, None)
    raw = {**kept, **over}
    fields = names.reading({key: value for key, value in {**names.defaults, **raw}.items() if value is not None})
    hints = typing.get_type_hints(cls)
    only = {**ONLY, **{key: (value,) for key, value in names.only.items()}}
    # null means none where the configuration here has another default.
    values: Fields = {key: None for key, value in raw.items() if value is None and key in hints and _optional(hints[key])}
    refused = []
    for key, value in fields.items():
        if key in hints:
            values[key] = _typed(value, hints[key], key)
        elif key not in only or value not in only[key]:
            accepted = f" (only {' or '.join(map(repr, only[key]))})" if only.get(key) else ""
            refused.append(f"{key}={value!r}{accepted}")
    if refused:
        raise UserError(
            f"config.json: not honoured by the architecture '{names.model_type}' here: {', '.join(refused)};"
            " use model: {name: hf, path: …} to run transformers' own code"
        )
    return cls(**values)


def _canonical(names: HFNames, fields: Fields) -> Fields:
    """One spelling; what is explicitly null stays so."""
    given = names.canonical({key: value for key, value in fields.items() if value is not None})
    return {**{key: None for key, value in fields.items() if value is None and key not in given}, **given}


def write(config: Any, names: HFNames, filled: Mapping[str, Any]) -> Fields:
    """The ``config.json`` of a configuration; ``filled`` are values it leaves empty."""
    fields: Fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fields = {key: value for key, value in {**fields, **filled}.items() if key != "depth_scaled_init"}
    fields["rope_scaling"] = _written_scaling(fields.get("rope_scaling"))
    eos = fields.get("eos_token_id")
    fields["eos_token_id"] = eos[0] if eos and len(eos) == 1 else eos
    fields = {key: value for key, value in names.writing(fields).items() if value is not None or key in names.defaults}
    return {"architectures": [names.architecture], "model_type": names.model_type, **fields, **names.only}


def _typed(value: Any, hint: Any, key: str) -> Any:
    """JSON's value as the field's type; a whole number serves as a float, a single id as a list."""
    kind = next(a for a in typing.get_args(hint) if a is not type(None)) if _optional(hint) else hint
    origin = typing.get_origin(kind)
    if kind is RopeScaling:
        return value
    if origin is list:
        items = value if isinstance(value, list) else [value]
        return [_typed(item, typing.get_args(kind)[0], key) for item in items]
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    right = isinstance(value, str) if origin is typing.Literal else isinstance(value, kind)
    if not right or (kind is int and isinstance(value, bool)):
        raise UserError(f"config.json: {key} is {value!r}, which is no {getattr(kind, '__name__', kind)}")
    if origin is typing.Literal and value not in typing.get_args(kind):
        raise UserError(f"config.json: {key} is '{value}'; honoured are {', '.join(typing.get_args(kind))}")
    return value


def _optional(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, UnionType) and type(None) in typing.get_args(hint)


def read_rope(fields: Fields) -> Fields:
    """``rope_scaling`` as a :class:`RopeScaling`."""
    given = fields.get("rope_scaling")
    return fields if given is None else {**fields, "rope_scaling": read_scaling(given)}


def read_scaling(given: Mapping[str, Any]) -> RopeScaling | None:
    """A rope section of config.json, its theta taken out.

    Raises:
        UserError: a type or a parameter that is not honoured.
    """
    given = {key: value for key, value in given.items() if value is not None}
    old_name = given.pop("type", "default")
    kind = given.pop("rope_type", old_name)
    if given.get("partial_rotary_factor") == 1.0:
        del given["partial_rotary_factor"]
    if kind == "default":
        if given:
            raise UserError(f"config.json: rope parameters {given} mean nothing to rope type 'default'")
        return None
    kinds = typing.get_args(typing.get_type_hints(RopeScaling)["rope_type"])
    if kind not in kinds:
        raise UserError(f"config.json: rope type '{kind}' is not honoured; these are: default, {', '.join(kinds)}")
    hints = typing.get_type_hints(RopeScaling)
    unknown = [key for key in given if key not in hints]
    if unknown:
        raise UserError(f"config.json: rope parameters that are not honoured: {', '.join(unknown)}")
    if "factor" not in given:
        raise UserError(f"config.json: rope type '{kind}' without a factor")
    return RopeScaling(rope_type=kind, **{key: _typed(value, hints[key], key) for key, value in given.items()})


def _written_scaling(scaling: RopeScaling | None) -> Fields | None:
    """Old style, which every version of transformers reads."""
    if scaling is None:
        return None
    default = RopeScaling()
    values = {f.name: getattr(scaling, f.name) for f in dataclasses.fields(scaling)}
    return {key: value for key, value in values.items() if key in ("rope_type", "factor") or value != getattr(default, key)}
