"""One program's training, for tools/bench training: its own model and loss, and the loop that its documentation shows. Prints figures as
JSON; exit code 3 where it is not installed.

    training_peers.py SPEC    (JSON: see training_cases.Case.spec)

With `memory` set, three steps under torch's profiler, which has begun before the model is there: what its events say is allocated at most
from the second step on.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

NOT_INSTALLED, WARM_UP, STEPS_FOR_MEMORY = 3, 3, 3
Spec = dict[str, Any]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def transformers(spec: Spec) -> tuple[Any, Loss]:
    """Weights from the model directory; with adapters those of peft, over 4 bits of bitsandbytes where asked for."""
    from transformers import AutoModelForCausalLM

    given: dict[str, Any] = {"dtype": torch.float32 if spec["trains"] == "all" else torch.bfloat16}
    if spec["trains"] == "qlora":
        from transformers import BitsAndBytesConfig

        given["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
        )
    model = AutoModelForCausalLM.from_pretrained(Path(spec["place"]) / "model", **given)
    if spec["recomputed"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec["trains"] != "all":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    return model, _loss_of_transformers(model)


def _loss_of_transformers(model: Any) -> Loss:
    return lambda x, y: model(input_ids=x, labels=y, shift_labels=y, use_cache=False).loss


def litgpt(spec: Spec) -> tuple[Any, Loss]:
    """Of the same shape, with weights of its own."""
    from litgpt import GPT, Config
    from litgpt.model import Block
    from litgpt.utils import chunked_cross_entropy

    given = json.loads((Path(spec["place"]) / "model" / "config.json").read_text())
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
    if spec["recomputed"]:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model, lambda x, y: chunked_cross_entropy(model(x), y, chunk_size=0)


def divided(model: Any) -> None:
    """By torch's own fully_shard: each block, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def accelerated(model: Any, optimizer: Any) -> tuple[Any, Any, Any]:
    """By accelerate, which divides nothing on a CPU but has each rank keep all of it: the model, the optimizer, and who does backward."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator


def adamw(model: Any) -> torch.optim.Optimizer:
    """What there is to train."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def run(spec: Spec, steps: int | None, after: Callable[[int], None] = lambda step: None) -> dict[str, float]:
    """Train on the batches of the place; tokens per second, and the last loss."""
    makes = {"transformers": transformers, "peft": transformers, "torch fully_shard": transformers, "accelerate's DDP": transformers}
    model, loss_of = {**makes, "litgpt": litgpt}[spec["program"]](spec)
    model.train()
    if spec["memory"]:
        for parameter in model.parameters():  # which may lie in mapped files so far
            parameter.data = parameter.data.clone()
    if spec["program"] == "torch fully_shard":
        divided(model)
    optimizer, accelerator = adamw(model), None
    if spec["program"] == "accelerate's DDP":
        model, optimizer, accelerator = accelerated(model, optimizer)
        loss_of = _loss_of_transformers(model)
    if spec["compiled"]:
        model.compile()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = torch.from_numpy(np.load(Path(spec["place"]) / "batches.npy"))
    casts = spec["precision"] == "bf16" and ranks == 1
    seconds, value = [], 0.0
    for step, all_rows in enumerate(batches[:steps]):
        rows = all_rows[rank::ranks]
        began = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
            loss = loss_of(rows[:, :-1], rows[:, 1:].contiguous())
        loss.backward() if accelerator is None else accelerator.backward(loss)
        if accelerator is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.item()
        seconds.append(time.perf_counter() - began)
        after(step)
    if ranks > 1:
        mean = torch.tensor(value)
        dist.all_reduce(mean)
        value = mean.item() / ranks
    tokens = batches.shape[1] * (batches.shape[2] - 1)
    return {"tokens/s": tokens / median(seconds[WARM_UP:] or seconds), "loss": value}


def allocated(spec: Spec) -> dict[str, float]:
    """MiB at most."""
    begins: list[int] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(spec, STEPS_FOR_MEMORY, lambda step: begins.append(time.time_ns()))
    totals = _totals(profiler)
    return {"allocated": max(total for moment, total in totals if moment > begins[0]) / 2**20}


def _totals(profiler: Any) -> Sequence[tuple[int, int]]:
    """Each event of the allocator: when, in ns since the epoch, and what was allocated after it."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    total, found = 0, []
    for event in sorted(events, key=lambda each: each.start_ns()):
        total += event.nbytes()
        found.append((event.start_ns(), total))
    return found


def main() -> None:
    """Print what was found, once."""
    spec = json.loads(sys.argv[1])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        found = allocated(spec) if spec["memory"] else run(spec, None)
    except ImportError as missing:
        print(missing, file=sys.stderr)
        sys.exit(NOT_INSTALLED)
    if not spec["memory"]:
        found["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**20
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
