"""One program's training, for tools/bench training: its own model and loss, and the loop that its documentation shows. Prints figures as
JSON; exit code 3 where it is not installed.

    training_peers.py transformers|litgpt eager|compiled bf16|fp32 PLACE
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

NOT_INSTALLED, WARM_UP = 3, 3
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def transformers(place: Path, compiled: bool) -> tuple[Any, Loss]:
    """Weights from the model directory."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    call = torch.compile(model) if compiled else model
    return model.train(), lambda x, y: call(input_ids=x, labels=y, shift_labels=y, use_cache=False).loss


def litgpt(place: Path, compiled: bool) -> tuple[Any, Loss]:
    """Of the same shape, with weights of its own."""
    from litgpt import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    given = json.loads((place / "model" / "config.json").read_text())
    config = Config(
        n_layer=given["num_hidden_layers"],
        n_head=given["num_attention_heads"],
        n_query_groups=given["num_key_value_heads"],
        n_embd=given["hidden_size"],
        intermediate_size=given["intermediate_size"],
        padded_vocab_size=given["vocab_size"],
        vocab_size=given["vocab_size"],
        block_size=given["max_position_embeddings"],
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
    )
    model = GPT(config)
    call = torch.compile(model) if compiled else model
    return model.train(), lambda x, y: chunked_cross_entropy(call(x), y, chunk_size=0)


def main() -> None:
    """Train on the batches of ``PLACE``."""
    program, mode, precision, place = sys.argv[1:5]
    try:
        model, loss_of = {"transformers": transformers, "litgpt": litgpt}[program](Path(place), mode == "compiled")
    except ImportError:
        sys.exit(NOT_INSTALLED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    seconds, value = [], 0.0
    batches = torch.from_numpy(np.load(Path(place) / "batches.npy"))
    for rows in batches:
        began = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(rows[:, :-1], rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        seconds.append(time.perf_counter() - began)
    tokens = batches.shape[1] * (batches.shape[2] - 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"tokens/s": tokens / median(seconds[WARM_UP:]), "loss": value, "peak": peak / 2**20}))


if __name__ == "__main__":
    main()
