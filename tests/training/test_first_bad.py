"""Looking for what is not finite leaves a model as it was, and computes what a step computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fw.checkpointing.placement import initialise
from fw.kinds.head import LinearHead
from fw.training.first_bad import FirstBad
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention


@pytest.fixture
def model() -> torch.nn.Module:
    made = Llama(LlamaConfig(16, 2, 2, 1, intermediate_size=24, vocab_size=32), 32, 64, SDPAttention(None))
    for name, parameter in made.named_parameters():
        initialise(parameter.data, name, made.init(name), seed=1)
    return made


def loss_of(model: torch.nn.Module, watched: FirstBad | None, spoil: float = 1.0) -> tuple[Tensor, list[Any]]:
    heads = []

    def readout(x_BLD: Tensor, head: Any, _: Tensor | None) -> Tensor:
        heads.append(head)
        return (head(x_BLD) * spoil).logsumexp(-1).mean()

    ids = torch.arange(12)[None]
    if watched is None:
        return model(ids, readout=readout), heads
    with watched.forward():
        loss = model(ids, readout=readout)
    watched.loss(loss)
    return loss, heads


def test_nothing_is_left_on_parameters(model: torch.nn.Module) -> None:
    watched = FirstBad(model)
    for _ in range(2):
        loss_of(model, watched)[0].backward()
    assert any(parameter._backward_hooks for parameter in model.parameters())
    watched.rest()
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert watched.found is None


def test_the_head_is_given_to_the_loss_as_in_any_step(model: torch.nn.Module) -> None:
    (plain,), (watched,) = (loss_of(model, how)[1] for how in (None, FirstBad(model)))
    assert isinstance(plain, LinearHead) and isinstance(watched, LinearHead)


def test_a_head_that_no_layer_computes_is_looked_at(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.lm_head.weight[3, 2] = torch.nan
    watched = FirstBad(model)
    loss_of(model, watched)
    assert watched.found == (0, False, "the weight lm_head.weight is not finite")


def test_a_gradient_of_the_head_is_looked_at(model: torch.nn.Module) -> None:
    watched = FirstBad(model)
    model.lm_head.weight.register_hook(lambda gradient: gradient * torch.inf)
    loss_of(model, watched)[0].backward()
    assert watched.found is not None and watched.found[1] and "lm_head" in watched.found[2]
