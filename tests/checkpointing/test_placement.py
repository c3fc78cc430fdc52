"""Initial values do not depend on how a parameter is divided."""

from __future__ import annotations

import pytest
import torch

from fw.checkpointing.placement import _CHUNK, _chunks, initialise
from fw.kinds.model import Init

NORMAL, UNIFORM = Init(std=1.0), Init(bound=0.25)


def drawn(first: int, last: int, init: Init) -> torch.Tensor:
    return torch.cat([values for _, values in _chunks(first, last, "w", 0, init)])


@pytest.mark.parametrize("cuts", [[0, 7], [0, 100, _CHUNK - 1, _CHUNK, _CHUNK + 1], [0, _CHUNK * 2 + 5], [3, _CHUNK, 3 * _CHUNK]])
def test_parts_are_parts_of_the_whole(cuts):
    for init in (NORMAL, UNIFORM):
        whole = drawn(0, cuts[-1], init)
        for first, last in zip(cuts, cuts[1:], strict=False):
            assert drawn(first, last, init).equal(whole[first:last])


def test_names_and_seeds_differ_and_the_spread_is_right():
    def filled(name: str, seed: int) -> torch.Tensor:
        tensor = torch.empty(300, 400)
        initialise(tensor, name, Init(std=0.5), seed)
        return tensor

    assert filled("a", 0).equal(filled("a", 0))
    assert not filled("a", 0).equal(filled("b", 0)) and not filled("a", 0).equal(filled("a", 1))
    assert filled("a", 0).std().item() == pytest.approx(0.5, rel=0.01)
    assert abs(filled("a", 0).mean().item()) < 0.01


def test_uniform_values_fill_their_bounds():
    tensor = torch.empty(300, 400)
    initialise(tensor, "a", UNIFORM, 0)
    assert -0.25 <= tensor.min() < -0.2499 and 0.2499 < tensor.max() <= 0.25
    assert tensor.std().item() == pytest.approx(0.25 / 3**0.5, rel=0.01)


def test_constants():
    tensor = torch.empty(5)
    initialise(tensor, "norm", Init(value=1.0), 0)
    assert tensor.equal(torch.ones(5))
