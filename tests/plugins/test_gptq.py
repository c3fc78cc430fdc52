"""GPTQ against optimal brain surgery by its own formula, with a plain inverse at every column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fw.errors import RunError
from fw_plugins.quantization.gptq import DAMPING, gptq
from fw_plugins.quantization.grouped import Grouped

OUT, INTO = 6, 160


def weight_and_inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs that go together, as those of real layers do."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(INTO, INTO, generator=generator) / INTO**0.5
    x_TI = torch.randn(512, 24, generator=generator) @ torch.randn(24, INTO, generator=generator) + torch.randn(512, INTO) * 0.1
    return torch.randn(OUT, INTO, generator=generator) / 8, x_TI + x_TI @ mixing


def by_definition(weight_OI: Tensor, gram_II: Tensor, layout: Grouped) -> Tensor:
    """Round a column; then move all that are not rounded yet by δ = -(w - q) / [F⁻¹]₀₀ · [F⁻¹]₀, F the Hessian of those (Frantar et al.
    2022, equation 2). fp64."""
    grid = layout.grid(weight_OI, weight_OI.dtype)
    rest, hessian = weight_OI.double().clone(), gram_II.double().clone()
    hessian.diagonal().add_(DAMPING * gram_II.double().diagonal().mean())
    left = gram_II.diagonal().argsort(descending=True, stable=True).tolist()
    dense = torch.empty_like(rest)
    while left:
        column = left[0]
        own = grid.of(column // layout.group)
        dense[:, column] = own.values(own.codes(rest[:, column].float())).double()
        inverse = torch.linalg.inv(hessian[left][:, left])
        error = (rest[:, column] - dense[:, column]) / inverse[0, 0]
        rest[:, left] -= error[:, None] * inverse[0]
        left = left[1:]
    return dense.float()


@pytest.mark.parametrize("bits, group, symmetric", [(4, 32, True), (4, 80, False), (8, 160, True)])
def test_codes_are_those_of_the_definition(bits: int, group: int, symmetric: bool) -> None:
    weight_OI, x_TI = weight_and_inputs()
    layout = Grouped((OUT, INTO), bits, group, symmetric)
    found = layout.dequantize(tuple(gptq(weight_OI, x_TI.t() @ x_TI, layout).values()), torch.float32)
    expected = by_definition(weight_OI, x_TI.t() @ x_TI, layout)
    # A value halfway between two codes falls either way, by the last bit of a sum.
    assert (found != expected).sum() <= 0.01 * found.numel()


@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_change_less_than_by_rounding(symmetric: bool) -> None:
    weight_OI, x_TI = weight_and_inputs()
    layout = Grouped((OUT, INTO), 4, 32, symmetric)

    def error(kept: dict[str, Tensor]) -> float:
        return float((x_TI @ (layout.dequantize(tuple(kept.values()), torch.float32) - weight_OI).t()).norm())

    assert error(gptq(weight_OI, x_TI.t() @ x_TI, layout)) < 0.5 * error(layout.quantize(weight_OI))


def test_what_is_never_seen_is_rounded() -> None:
    weight_OI, x_TI = weight_and_inputs()
    layout = Grouped((OUT, INTO), 4, 32, True)
    nothing = gptq(weight_OI, torch.zeros(INTO, INTO), layout)
    assert all(torch.equal(nothing[name], value) for name, value in layout.quantize(weight_OI).items())
    x_TI[:, 40:] = 0
    found = layout.dequantize(tuple(gptq(weight_OI, x_TI.t() @ x_TI, layout).values()), torch.float32)
    rounded = layout.dequantize(tuple(layout.quantize(weight_OI).values()), torch.float32)
    assert torch.equal(found[:, 40:], rounded[:, 40:]) and not torch.equal(found[:, :40], rounded[:, :40])


def test_numbers_that_are_none_are_said() -> None:
    weight_OI, _ = weight_and_inputs()
    with pytest.raises(RunError, match="no inverse"):
        gptq(weight_OI, torch.full((INTO, INTO), torch.inf), Grouped((OUT, INTO), 4, 32, True))
