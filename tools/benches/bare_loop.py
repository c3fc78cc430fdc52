"""A bare PyTorch training loop: what the overhead of fw is measured against. torch only; the model is passed in."""

import time

import torch
import torch.nn.functional as F


def train(model: torch.nn.Module, ids: torch.Tensor, steps: int, batch: int, lr: float, dtype: torch.dtype) -> list[float]:
    """Train on random rows of ``ids`` [N, L + 1]; returns the seconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    order = torch.randperm(len(ids))
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        rows = ids[order[torch.arange(step * batch, (step + 1) * batch) % len(ids)]]
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            logits = model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # a training loop says its loss
        seconds.append(time.perf_counter() - start)
    return seconds
