"""A model directory in fewer bits: block by block, by rounding or by what each layer sees of some text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fw.config import format_size
from fw.errors import UserError
from fw.kinds import plugin_class
from fw.kinds.data import Say
from fw.kinds.model import CausalLM
from fw.kinds.quantization import QuantizationPlugin
from fw.pretrained.awq import rescale
from fw.pretrained.block_pass import Change, estimate
from fw.pretrained.load import file_name
from fw.pretrained.rewriting import Look, Report, Source, check_memory, rewrite

RTN, AWQ = "rtn", "awq"
_GROUP_SIZE, _WHOLE_ROWS = "group_size", -1


def quantize(
    source: str | Path, to: str | Path, method: str, quantization: str, settings: Mapping[str, Any], look: Look, tell: Say
) -> Report:
    """Write the model directory ``to``.

    One block is in memory at a time, beside embedding and head and the hidden states of the rows.

    Args:
        method: ``rtn``; ``awq``, where the model says what can be rescaled; or one that the plugin knows besides.
        quantization: a plugin, by name.
        settings: its options.

    Raises:
        UserError: no such model, options that do not fit it, or more memory is needed than ``look.memory``.
    """
    found = Source(source, look)
    model = found.build().to(found.dtype)
    coded, size = _coded(found, method, quantization, settings)
    assert coded.quantization is not None
    for name in coded.quantized:
        file_name(coded, name)  # or it is refused, before anything is done
    text = found.text(tell)
    if method == RTN:
        text = replace(text, ids_NL=text.ids_NL[:0])
    shapes = [(weight.shape[0], weight.shape[1]) for weight in coded.quantized.values()]
    needed = estimate(model, shapes, text, found.dtype)
    check_memory(look, needed, format_size)
    groups = "a scale for each row" if size == _WHOLE_ROWS else f"a scale for {size} neighbours"
    tell(f"{len(shapes)} layers of {len(model.blocks)} blocks, {groups}; memory: at most {format_size(needed)}, by estimate")
    if stacked := {name: p.numel() for name, p in model.named_parameters() if any(of.index is not None for of in model.hf_tensors(name))}:
        share = sum(stacked.values()) / sum(p.numel() for p in model.parameters())
        tell(
            f"stacked experts keep their weights, {share:.0%} of the model's; fw reads such a directory, transformers takes experts to be"
            " packed and does not: for it save the model in nf4 or int8"
        )
    config = {"quantization_config": dict(coded.quantization.hf_config(coded))}
    return rewrite(found, model, _Codes(model, coded, method), text, to, method, needed, config)


def _coded(source: Source, method: str, quantization: str, settings: Mapping[str, Any]) -> tuple[CausalLM, int]:
    """The model with codes for weights, on the meta device, and the neighbours that share a scale: where nobody says, the usual number, and
    fewer where it does not divide."""
    cls = plugin_class(QuantizationPlugin, quantization)
    asked = settings.get(_GROUP_SIZE)
    sizes = (asked,) if asked is not None else (128, 64, 32, _WHOLE_ROWS)
    for size in sizes:
        plugin = cls(cls.Config(**{**settings, _GROUP_SIZE: size}))
        if method not in (*plugin.methods, AWQ):
            raise UserError(f"--method {method}: {quantization} knows {', '.join((*plugin.methods, AWQ))}")
        coded = source.build()
        if method == AWQ and not coded.rescalings(0):
            raise UserError(f"--method awq: {type(coded).__name__} does not say what of it can be rescaled; use gptq")
        try:
            with torch.device("meta"):
                coded.quantized, coded.quantization = plugin.apply(coded, source.dtype), plugin
            return coded, size
        except UserError:
            if size == sizes[-1]:
                raise
    raise AssertionError("the last one returns or raises")


class _Codes(Change):
    """Weights become codes."""

    doing = "quantizing"

    def __init__(self, model: CausalLM, coded: CausalLM, method: str) -> None:
        self._model, self._coded, self._method = model, coded, method

    @property
    def names(self) -> Collection[str]:
        return self._coded.quantized

    def prepare(self, number: int, block: nn.Module, prefix: str, found: Mapping[str, Tensor]) -> None:
        """For ``awq``, weights and what comes before them are scaled."""
        if self._method == AWQ:
            rescale(block, prefix, self._model.rescalings(number), found, self._rounded)

    def _rounded(self, name: str, weight_OI: Tensor) -> Tensor:
        return self._dense(name, self._coded.quantized[name].quantize(weight_OI), weight_OI.dtype)

    def __call__(self, name: str, weight_OI: Tensor, gram_II: Tensor | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        weight, plugin = self._coded.quantized[name], self._coded.quantization
        assert plugin is not None
        if gram_II is None or self._method in (RTN, AWQ):
            values = weight.quantize(weight_OI)
        else:
            values = plugin.calibrate(weight, weight_OI, gram_II, self._method)
        stored = plugin.written(file_name(self._coded, name), weight, {part: values[part] for part in weight.kept})
        return self._dense(name, values, weight_OI.dtype), stored

    def _dense(self, name: str, values: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        module: Any = self._coded.get_submodule(name.removesuffix(".weight"))
        for part in self._coded.quantized[name].kept:
            module.register_parameter(part.rpartition(".")[2], nn.Parameter(values[part], requires_grad=False))
        dense: Tensor = module.dense_weight(dtype)
        module.to("meta")
        return dense
