"""A linear layer whose weight is kept as codes, in whatever layout; and the plugin that makes layers keep them.

All that is kept is of an integer dtype: what casts a model's parameters leaves it alone. fp32 numbers are kept as their bits.

Shape suffixes: O features out, I features in.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.api import CausalLM, Conflicts, QuantizationPlugin, Quantized, StoredWeight, UserError, reading_codes
from fw.api.kernels import GroupedCodes

CONFLICTS = (
    Conflicts("peft", ("none",), "codes do not train; choose what does, as peft=lora"),
    Conflicts("peft", ("dora",), "the norms of rows are of the weights, which are not kept; use peft=lora"),
    Conflicts("precision", ("fp8",), "its products would be of weights that are not kept; use precision=bf16"),
)


class Layout(Protocol):
    """How a weight ``[O, I]`` is kept."""

    @property
    def features(self) -> tuple[int, int]:
        """O and I."""

    def kept(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of a layer's parameters, by name; ``weight`` first."""

    def quantize(self, weight_OI: Tensor) -> dict[str, Tensor]:
        """What is kept of a weight."""

    def dequantize(self, kept: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """``[O, I]`` of what :meth:`kept` names, in its order."""

    def grouped(self, kept: tuple[Tensor, ...]) -> GroupedCodes | None:
        """The same as codes in groups of a row; None where they are not."""


@dataclass(frozen=True)
class Quantize:
    """Makes codes of the weight of a layer, called as its parameters are."""

    name: str
    layout: Layout

    def __call__(self, weight_OI: Tensor) -> dict[str, Tensor]:
        return self.named(self.layout.quantize(weight_OI))

    def names(self) -> dict[str, str]:
        """Of the parameters in the model, by what the layout calls them."""
        return {key: f"{self.name}.{key}" for key in self.layout.kept()}

    def named(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By the model's names."""
        return {name: values[key] for key, name in self.names().items()}


class CodedWeight(StoredWeight):
    """One that files hold in a layout that a layer may keep it in."""

    layout: Layout

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._name, self._dtype = name, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight itself."""
        return self.layout.features

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight before."""
        return self._dtype

    @abstractmethod
    def values(self) -> dict[str, Tensor]:
        """What a layer keeps, in the order of :meth:`Layout.kept`, read now."""

    def _whole(self) -> dict[str, Tensor]:
        """The values, which are of the shapes and dtypes that a layer keeps."""
        values = self.values()
        for key, (shape, dtype) in self.layout.kept().items():
            if values[key].shape != shape or values[key].dtype != dtype:
                raise UserError(
                    f"{self._name}: of a weight {list(self.shape)} there is {key} {list(values[key].shape)} of {values[key].dtype}, and not"
                    f" {list(shape)} of {dtype}; take a directory of the plain weights"
                )
        return values

    def dense(self) -> Tensor:
        """What the codes stand for."""
        return self.layout.dequantize(tuple(self._whole().values()), self._dtype)

    def kept(self, weight: Quantized) -> Mapping[str, Tensor] | None:
        """The same bytes, where the layout is the same."""
        if not isinstance(weight.quantize, Quantize) or weight.quantize.layout != self.layout:
            return None
        return weight.quantize.named(self._whole())


class CodedLinear(nn.Linear):
    """``W x + b``, W given by codes. No gradient for W; that of x is computed from the codes again."""

    layout: Layout
    """What its parameters are: ``weight`` are codes, uint8; scales beside it."""
    compute_dtype: torch.dtype | None = None
    """Of its products; None for that of activations."""

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """What the codes stand for, ``[O, I]``."""
        return self.layout.dequantize(self._kept(), dtype)

    def grouped_codes(self) -> GroupedCodes | None:
        """For a layer that computes with them, in bfloat16; None where this one does more."""
        if type(self) is not CodedLinear or self.compute_dtype not in (None, torch.bfloat16):
            return None
        return self.layout.grouped(self._kept())

    def _kept(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.layout.kept())

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``."""
        device = x_I.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_I.dtype
        compute = self.compute_dtype or dtype
        if compute == dtype:
            return self._product(x_I, dtype)
        with torch.autocast(device, enabled=False):
            return self._product(x_I, compute).to(dtype)

    def _product(self, x_I: Tensor, dtype: torch.dtype) -> Tensor:
        out_O: Tensor = _Product.apply(x_I.to(dtype), self.layout, *self._kept())
        return out_O if self.bias is None else out_O + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_I: Tensor, layout: Layout, *kept: Tensor) -> Tensor:
        ctx.layout, ctx.dtype = layout, x_I.dtype
        ctx.save_for_backward(*kept)
        return F.linear(x_I, layout.dequantize(kept, x_I.dtype))

    @staticmethod
    def backward(ctx: Any, grad_O: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        grad_I = grad_O @ ctx.layout.dequantize(kept, ctx.dtype) if ctx.needs_input_grad[0] else None
        return grad_I, None, *(None for _ in kept)


class CodedLinears(QuantizationPlugin):
    """Linear layers keep codes, but for those whose names match ``config.skip``; of files, those that have codes there."""

    conflicts = CONFLICTS
    _in_files: frozenset[str] | None = None
    """Weights that the files have codes of; None where options say what is quantized."""
    _read: Callable[[str], Tensor] | None = None
    """Gives a tensor of these files."""

    def look(self, read: Callable[[str], Tensor]) -> None:
        """For what :meth:`layout_in_files` wants to know."""
        self._read = read

    def computes_in(self) -> torch.dtype | None:
        """Dtype of the products; None for that of activations."""
        return None

    def layout_in_files(self, name: str, read: Callable[[str], Tensor]) -> Layout | None:
        """How files keep a weight, by its name there; None where they all keep theirs as :meth:`layout` says."""
        return None

    @abstractmethod
    def layout(self, name: str, features: tuple[int, int]) -> Layout:
        """Of a layer's weight.

        Raises:
            UserError: the options do not fit it.
        """

    def apply(self, model: CausalLM, compute: torch.dtype) -> Mapping[str, Quantized]:
        """Every linear layer but those to skip."""
        found: dict[str, Quantized] = {}
        for name, linear in list(linears(model)):
            if self._skips(name, model):
                continue
            features = (linear.out_features, linear.in_features)
            layout = self._found(name, model) or self.layout(name, features)
            linear.__class__ = CodedLinear
            assert isinstance(linear, CodedLinear)
            linear.layout, linear.compute_dtype = layout, self.computes_in()
            for key, (shape, dtype) in layout.kept().items():
                linear.register_parameter(key, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
            quantize = Quantize(name, layout)
            found[f"{name}.weight"] = Quantized(features, compute, tuple(quantize.names().values()), quantize)
        if not found:
            raise UserError("quantization.skip: no linear layer is left; use quantization=none")
        return found

    def _found(self, name: str, model: CausalLM) -> Layout | None:
        """In the files that this plugin was made for."""
        if self._in_files is None or self._read is None:
            return None
        own = model.hf_tensors(f"{name}.weight")
        if len(own) != 1 or own[0].name not in self._in_files:
            return None
        if own[0].transposed:
            raise UserError(f"{own[0].name}: codes of a weight that files hold transposed are not read; take the plain weights")
        with reading_codes(own[0].name):
            return self.layout_in_files(own[0].name, self._read)

    def _skips(self, name: str, model: CausalLM) -> bool:
        if self._in_files is not None:
            return not any(of.name in self._in_files for of in model.hf_tensors(f"{name}.weight"))
        skip: list[str] = getattr(self.config, "skip", [])
        return any(fnmatchcase(name, pattern) for pattern in skip)


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Plain ones, with their names."""
    return ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)


def left_whole(model: CausalLM) -> list[str]:
    """Linear layers that keep their weights, as a model's files call them; a head that is the embedding is none here, and one there."""
    own = [of.name for name, _ in linears(model) for of in model.hf_tensors(f"{name}.weight")]
    return [name.removesuffix(".weight") for name in (*own, *model.hf_repeated())]
