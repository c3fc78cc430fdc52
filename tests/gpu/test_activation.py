"""Recomputation on a GPU: flash attention's results among those kept, dropout's generator on the device, memory by the allocator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fw.checkpointing.placement import initialise
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention
from plugins.test_activation import SPEC, plugin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LENGTH = 512
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "sqrt": {},
    "selective": {},
    "modules": {"patterns": ["*.mlp"]},
    "auto": {"budget": "96MiB"},
}


def trained(name: str, dropout: float, **options: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of the third step, and the most bytes it took beyond what was there."""
    with torch.device("meta"):
        config = LlamaConfig(256, 12, 4, intermediate_size=688, attention_dropout=dropout)
        model = Llama(config, 1000, LENGTH, SDPAttention(None))
    made = plugin(name, **options)
    made.apply(model, SPEC, LENGTH)
    model.materialise(torch.device("cuda"))
    for parameter, tensor in model.named_parameters():
        initialise(tensor.data, parameter, model.init(parameter), 0)
    ids = torch.arange(4 * LENGTH, device="cuda").view(4, LENGTH) * 7 % 1000
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        torch.manual_seed(1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, readout=lambda x, head, extra: x.float().square().mean())
        loss.backward()
        peak = torch.cuda.max_memory_allocated() - before
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}, peak


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_gradients_agree_and_memory_falls(dropout):
    expected, most = trained("none", dropout)
    for name, options in WAYS.items():
        found, peak = trained(name, dropout, **options)
        assert torch.equal(found["loss"], expected["loss"]), name
        for key, value in expected.items():
            # Flash attention's backward adds up in the order in which blocks of threads finish.
            torch.testing.assert_close(found[key], value, rtol=2e-2, atol=2e-2 * float(value.abs().max()), msg=lambda t, k=key: f"{k}: {t}")
        assert peak < most, (name, peak, most)
