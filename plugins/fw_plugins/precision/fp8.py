"""fp8: the blocks' matrix products in 8 bits, by torchao."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fw.api import CONTEXT, CausalLM, PrecisionPlugin, PrecisionPolicy, StepSpec, UserError, gpu_capability
from fw_plugins.precision.float8_linear import recipe_config, to_float8

_MULTIPLE = 16  # what float8 products want of each dimension (torch._scaled_mm)
_KEPT = ("*lm_head", "*.gate")


@dataclass
class FP8Config:
    """How values are scaled into 8 bits, and where."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """One scale for a tensor (fastest), one for each row (more accurate), or that with the weights' gradients computed in bf16 (most
    accurate). Scales are taken anew for every product; no effect on memory."""
    skip: list[str] = field(default_factory=lambda: list(_KEPT))
    """Linear layers that stay in bf16, by name, where `*` stands for anything. By default the head and the routers of experts, whose
    errors cost most. Layers with a dimension that is no multiple of 16 stay besides."""
    emulate: bool | None = None
    """Compute the products in fp32 from values rounded to 8 bits: slower than bf16, and more temporary bytes. Empty for where the device
    has no float8 products; `false` refuses to run there."""
    accumulate: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gradients between their micro-batches and the step: `bf16` takes half the bytes, and rounds each sum to 8 bits."""
    full_eval: bool = False
    """Validate and sample on weights converted to bf16 once, without autocast: activations between layers take half the bytes. On a GPU
    the fp32 weights wait in host memory meanwhile, 4 bytes per parameter; on the CPU they stay beside the converted ones, which float8
    layers would not need: 2 bytes per parameter more. `fsdp` and `zero` do not differ by it."""


class FP8(PrecisionPlugin):
    """Linear layers multiply in float8 (torchao), the rest computes in bfloat16; weights and optimizer in fp32. For speed, not memory."""

    api = 1
    Config = FP8Config
    config: FP8Config
    packages = {"torchao": "fw[fp8]"}  # noqa: RUF012

    def policy(self) -> PrecisionPolicy:
        """The dtypes around the products."""
        accumulate = torch.bfloat16 if self.config.accumulate == "bf16" else torch.float32
        return PrecisionPolicy(torch.float32, torch.bfloat16, torch.float32, accumulate=accumulate, full_eval=self.config.full_eval)

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int], spec: StepSpec, sequence_length: int) -> None:
        """There must be layers to convert, products that the device has, and tokens that they take."""
        names = [name for name, _ in _linears(model)]
        for pattern in self.config.skip:
            if pattern not in _KEPT and not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in names))
                raise UserError(f"precision.skip: '{pattern}' is no linear layer of the model; there are {some or 'none'}")
        if not any(self._converts(name, linear) for name, linear in _linears(model)):
            if model.adapters is not None:
                raise UserError(
                    "precision: fp8 computes plain linear layers in float8, and peft changes all of this model's, whose products stay in"
                    " bfloat16; use precision=bf16, or name fewer layers in peft.targets"
                )
            raise UserError(
                f"precision.skip: none of the model's {len(names)} linear layers is left to compute in float8, which takes dimensions"
                f" that are multiples of {_MULTIPLE}; use precision=bf16"
            )
        if spec.device_type == "cuda" and gpu_capability(torch.device("cuda")) is None:
            return  # another host's device, which its ranks look at
        if self._emulates(torch.device(spec.device_type)) or self.config.recipe == "rowwise_with_gw_hp":
            return
        rows = 1 if spec.micro_batch_size is None or spec.lengths_vary else spec.micro_batch_size  # where they vary, it may be one
        tokens = rows * sequence_length // mesh_shape.get(CONTEXT, 1)
        if tokens % _MULTIPLE:
            raise UserError(
                f"precision.recipe: {self.config.recipe} multiplies over the tokens of a micro-batch for the gradient of weights,"
                f" and {tokens} is no multiple of {_MULTIPLE}; change train.micro_batch_size or train.sequence_length, or use the recipe"
                " rowwise_with_gw_hp"
            )

    def convert(self, model: CausalLM, device: torch.device) -> None:
        """What fits becomes a float8 layer."""
        config = recipe_config(self.config.recipe, emulates := self._emulates(device))
        linears = list(_linears(model))
        chosen = [linear for name, linear in linears if self._converts(name, linear)]
        for linear in chosen:
            to_float8(linear, config)
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        why = "as asked for" if self.config.emulate else "which this device has no products for"
        emulated = f", emulated, {why}: slower than bf16, and nothing is saved" if emulates else ""
        print(f"fw: {len(chosen)} of {len(linears)} linear layers compute in float8 ({self.config.recipe}){emulated}", file=sys.stderr)

    def _converts(self, name: str, linear: nn.Linear) -> bool:
        weight = linear.weight.to_local() if isinstance(linear.weight, DTensor) else linear.weight
        fits = all(size and size % _MULTIPLE == 0 for size in weight.shape)
        return fits and not any(fnmatchcase(name, pattern) for pattern in self.config.skip)

    def _emulates(self, device: torch.device) -> bool:
        """As asked for, or by what the device has.

        Raises:
            UserError: it does not have what was asked for.
        """
        least = (8, 9) if self.config.recipe == "tensorwise" else (9, 0)
        capability = gpu_capability(device)
        has = capability is not None and capability >= least
        if self.config.emulate is False and not has:
            raise UserError(
                f"precision.emulate: false, but float8 products by recipe {self.config.recipe} need a GPU of compute capability"
                f" {least[0]}.{least[1]} or later; leave it out to have them emulated, or use precision=bf16"
            )
        return not has if self.config.emulate is None else self.config.emulate


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Plain linear layers; what derives from them may compute otherwise."""
    return ((name, module) for name, module in model.named_modules() if type(module) is nn.Linear)
