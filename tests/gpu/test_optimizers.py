"""fw's own optimizers on a GPU: the updates of the CPU, state where the parameters are, and the bytes that the documentation tells."""

from __future__ import annotations

import pytest
import torch

from fw_plugins.optimizer.adafactor import AdafactorUpdate
from fw_plugins.optimizer.adamw_8bit import AdamW8bitUpdate
from fw_plugins.optimizer.adamw_bf16 import AdamWBF16Update
from fw_plugins.optimizer.lamb import LambUpdate
from fw_plugins.optimizer.lion import LionUpdate
from fw_plugins.optimizer.lion_8bit import Lion8bitUpdate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

BYTES = {AdamW8bitUpdate: 2.04, AdamWBF16Update: 4.01, LambUpdate: 8.01, LionUpdate: 4.01, Lion8bitUpdate: 1.02, AdafactorUpdate: 0.02}


@pytest.mark.parametrize("cls", BYTES)
def test_the_update_is_that_of_the_cpu(cls):
    start = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    made = {}
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # cuBLAS takes its workspace
    for device in ("cpu", "cuda"):
        weight = torch.nn.Parameter(start.clone().to(device))
        optimizer = cls([weight], lr=1e-2, weight_decay=0.1)
        generator = torch.Generator().manual_seed(1)
        before = torch.cuda.memory_allocated() if device == "cuda" else 0
        for _ in range(3):
            weight.grad = torch.randn(512, 1024, generator=generator).to(device)
            optimizer.step()
            weight.grad = None
        if device == "cuda":
            assert torch.cuda.memory_allocated() - before <= BYTES[cls] * weight.numel() + 4096
            assert all(tensor.is_cuda for tensor in optimizer.state[weight].values() if tensor.dim())
        made[device] = weight.detach().cpu()
    moved = (made["cpu"] - start).abs().mean()
    # Random numbers differ between devices, and codes half way between two numbers may go to either.
    assert (made["cpu"] - made["cuda"]).abs().mean() < 0.02 * moved
