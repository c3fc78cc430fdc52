"""What products take besides what they are of."""

from __future__ import annotations

import torch
from torch.profiler import ProfilerActivity, profile


def packed_for_products() -> int:
    """Bytes that oneDNN takes to pack operands of products in bf16, on processors that multiply these; a plan does not know them."""
    shapes = [(8, 256, 300), (8, 300, 256), (300, 8, 256), (8, 256, 1376), (8, 1376, 256)]
    shapes += [(tokens, 64, 300) for tokens in (128, 256, 512)] + [(tokens, 300, 64) for tokens in (128, 256, 512)]
    shapes += [(300, tokens, 64) for tokens in (128, 256, 512)]
    most = 0
    for rows, inner, columns in shapes:
        for a in (torch.ones(rows, inner), torch.ones(inner, rows).t()):
            for b in (torch.ones(inner, columns), torch.ones(columns, inner).t()):
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                    torch.mm(a.bfloat16(), b.bfloat16())
                taken = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
                most = max([most, *(nbytes for nbytes in taken if nbytes not in (2 * x.numel() for x in (a, b, a @ b)))])
    return most
