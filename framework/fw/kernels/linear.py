"""Linear layers in bfloat16 by kernels of fw's own: weights are read once, at the speed of memory, and a row's result does not depend on
how many others there are."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.kernels.calls import Kernel
from fw.kernels.room import Room
from fw.planned import on_gpu

PANEL, LANES = 32, 16
LINEAR = Kernel("fw_linear", [ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_long])
"""Of linear.cpp."""


def available() -> bool:
    """Whether the kernel can be had on this machine."""
    return LINEAR.available


def takes(layer: nn.Module) -> bool:
    """Whether it is a plain layer of such weights on the CPU."""
    if type(layer) is not nn.Linear or layer.in_features % 2:
        return False
    return layer.weight.dtype == torch.bfloat16 and layer.weight.is_cpu and not on_gpu(layer.weight)


def layer_of(weight_OI: Tensor) -> nn.Linear:
    """One that has this weight, which is not copied, and no bias."""
    outputs, inputs = weight_OI.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_OI, requires_grad=False)
    return layer


def packed(weight_OI: Tensor, room: Room, together: int = 2) -> Tensor:
    """As the kernels read it, ``[⌈O/32⌉, ⌈I/g⌉, 32, g]`` with g neighbours ``together``, filled up with zeros."""
    outputs, inputs = weight_OI.shape
    fill = -inputs % together, -outputs % PANEL
    padded_OI = F.pad(weight_OI, (0, fill[0], 0, fill[1])) if any(fill) else weight_OI  # which copies in any case
    panels = padded_OI.view(-1, PANEL, padded_OI.shape[1] // together, together).transpose(1, 2)
    found = room.empty(panels.shape, panels.dtype)
    apart = (panels.storage_offset(), *panels.stride()[:3])
    # Neighbours stay so: where they are words, half or a quarter as many numbers are copied.
    if together * panels.element_size() == 4 and panels.stride(3) == 1 and not any(step % together for step in apart):
        found.view(torch.int32).copy_(panels.view(torch.int32))
        return found
    return found.copy_(panels)


class _Layer(ctypes.Structure):
    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "sums", "bias", "y")),
        *((name, ctypes.c_long) for name in ("outputs", "output_step", "input_step")),
        *((name, ctypes.c_void_p) for name in ("offset", "table")),
        *((name, ctypes.c_long) for name in ("group", "gates")),
    ]


class PackedLinear(nn.Module):
    """``x Wᵀ + b`` with W packed; takes the place of a linear layer that no longer changes.

    Args:
        room: that W is packed into; one of its own where none is given.
    """

    kind: ClassVar[int] = 0
    packed: Tensor
    scale: Tensor | None
    sums: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, room: Room | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        kept = {"scale": None, "sums": None, **self._kept(layer.weight.detach(), room or Room(layer.weight.nbytes))}
        for name, tensor in {**kept, "bias": None if layer.bias is None else layer.bias.detach().float()}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.together = Together([self])

    def _kept(self, weight_OI: Tensor, room: Room) -> dict[str, Tensor]:
        return {"packed": packed(weight_OI, room)}

    def forward(self, x_I: Tensor) -> Tensor:
        """``[…, I]`` → ``[…, O]``, in bfloat16."""
        return self.together.compute(self, x_I)

    def describe(self, layer: Any) -> None:
        """What the kernel must know besides."""

    @property
    def weight_bytes(self) -> int:
        """That each product reads."""
        return sum(tensor.nbytes for name, tensor in self.named_buffers(recurse=False) if name != "bias")

    def extra_repr(self) -> str:
        """As of the layer that it was."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Together:
    """Layers of one kind that are given the same x, one after another: the first one computes for all. Several are used by one thread."""

    def __init__(self, layers: Sequence[PackedLinear]) -> None:
        self._layers = layers
        self._inputs = layers[0].in_features
        self._described = (_Layer * len(layers))()
        for layer, described in zip(layers, self._described, strict=True):
            for name, tensor in (("weight", layer.packed), ("scale", layer.scale), ("sums", layer.sums), ("bias", layer.bias)):
                setattr(described, name, None if tensor is None else tensor.data_ptr())
            described.outputs = layer.out_features
            described.output_step, described.input_step = layer.packed.stride()[:2]
            layer.describe(described)
        self._of: Tensor | None = None
        self._found: dict[PackedLinear, Tensor] = {}

    @staticmethod
    def join(layers: Sequence[PackedLinear]) -> None:
        """From now on these are computed together."""
        made = Together(layers)
        for layer in layers:
            layer.together = made

    def compute(self, layer: PackedLinear, x_I: Tensor) -> Tensor:
        """What ``layer`` makes of x."""
        if self._of is x_I and (known := self._found.pop(layer, None)) is not None:
            if not self._found:
                self._of = None
            return known
        layers, found = self._copied(), {}
        for each, described in zip(self._layers, layers, strict=True):
            found[each] = y_O = torch.empty(*x_I.shape[:-1], each.out_features, dtype=torch.bfloat16)
            described.y = y_O.data_ptr()
        self._run(x_I, layers)
        y_O = found.pop(layer)
        self._of, self._found = (x_I, found) if found else (None, {})
        return y_O

    def gated(self, x_I: Tensor) -> Tensor:
        """``silu`` of what the first of two makes of x, times what the second does."""
        layers = self._copied()
        y_O = torch.empty(*x_I.shape[:-1], self._layers[0].out_features, dtype=torch.bfloat16)
        layers[0].gates, layers[0].y, layers[1].y = 1, y_O.data_ptr(), y_O.data_ptr()
        self._run(x_I, layers)
        return y_O

    def gates(self, gate: nn.Module, up: nn.Module) -> bool:
        """Whether these are the two, and the kernel takes them so."""
        return len(self._layers) == 2 and self._layers[0] is gate and self._layers[1] is up and gate.out_features % LANES == 0

    def _copied(self) -> ctypes.Array[_Layer]:
        return type(self._described).from_buffer_copy(self._described)

    def _run(self, x_I: Tensor, layers: ctypes.Array[_Layer]) -> None:
        flat_I = x_I.contiguous()
        LINEAR(self._layers[0].kind, flat_I.data_ptr(), layers, len(layers), flat_I.numel() // self._inputs, self._inputs)


def silu_gated(gate: nn.Module, up: nn.Module, x_I: Tensor) -> Tensor | None:
    """``silu(gate(x)) · up(x)``, to the bit as :func:`fw.kernels.elementwise.silu_mul` of both gives it, without either lying in memory;
    None where the two are not computed together, or somebody hears of one's results."""
    if not isinstance(gate, PackedLinear) or not gate.together.gates(gate, up):
        return None
    if any(layer._forward_hooks or layer._forward_pre_hooks for layer in (gate, up)):
        return None
    return gate.together.gated(x_I)


class PlainLinear(PackedLinear):
    """The same, result and all, with W as it lies, in rows or in columns: for one that stays in a file, or that others use as it is."""

    kind = 3

    def _kept(self, weight_OI: Tensor, room: Room) -> dict[str, Tensor]:
        return {"packed": weight_OI}


class Int8Linear(PackedLinear):
    """The same with W as codes of 8 bits, rounded to the nearest, and a scale for each output; x as it is."""

    kind = 1

    def _kept(self, weight_OI: Tensor, room: Room) -> dict[str, Tensor]:
        codes_OI, scale_O = _codes(weight_OI)
        return {"packed": packed(codes_OI, room), "scale": scale_O}


class W8A8Linear(PackedLinear):
    """The same, and each row of x as codes of 8 bits with a scale, too: products of whole numbers."""

    kind = 2

    def _kept(self, weight_OI: Tensor, room: Room) -> dict[str, Tensor]:
        codes_OI, scale_O = _codes(weight_OI)
        return {"packed": packed(codes_OI, room, together=4), "scale": scale_O, "sums": codes_OI.sum(1, dtype=torch.int32)}


def _codes(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """-127 … 127, and the scale of each row."""
    most_O = weight_OI.new_empty(len(weight_OI))
    for begin in range(0, len(weight_OI), 256):
        torch.amax(weight_OI[begin : begin + 256].abs(), 1, out=most_O[begin : begin + 256])
    scale_O = most_O.float() / 127
    by_O = torch.where(scale_O > 0, 1 / scale_O, 0.0)
    codes_OI = torch.empty(weight_OI.shape, dtype=torch.int8)
    for begin in range(0, len(weight_OI), 256):  # so that no more than a few rows are there in fp32
        some = slice(begin, begin + 256)
        codes_OI[some] = (weight_OI[some].float() * by_O[some, None]).round().clamp(-127, 127).to(torch.int8)
    return codes_OI, scale_O
