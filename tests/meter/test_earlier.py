"""Which tensors have memory that is known by them."""

from __future__ import annotations

import torch

from fw.meter.earlier import in_one_piece


def test_those_that_stand_for_others_have_none() -> None:
    """As torch.compile makes and keeps some."""
    plain, sparse = torch.ones(3), torch.ones(3).to_sparse()
    functional = torch._to_functional_tensor(torch.ones(3))
    found = [id(tensor) for tensor in in_one_piece()]
    assert id(plain) in found and id(sparse) not in found and id(functional) not in found
