"""One program of `tools/bench inference`, in a process of its own: PROGRAM MODEL WEIGHTS PROMPT NEW BATCH...

Prints a line of JSON; ends with 3 where the program is not installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOT_INSTALLED = 3
Run = Callable[[list[list[int]], int], tuple[float, float]]
"""Prompts and how many new tokens to seconds until all have their first one, and seconds after that."""


def in_two(timed: Callable[[list[list[int]], int], float]) -> Run:
    """Of a program that is timed as a whole: with one new token, and with all."""

    def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
        first = timed(prompts, 1)
        return first, timed(prompts, new) - first if new > 1 else 0.0

    return run


def of_fw(model: str, weights: str, context: int, most: int) -> Run:
    """fw's engine."""
    import fw

    chosen: dict[str, Any] = {
        "w4a16": {"quantization": {"name": "w4a16", "group_size": 64, "skip": []}},  # as many bytes as q4_0's
        "2 ranks": {"tensor": 2},
    }.get(weights, {"weights": weights})
    cache = {"name": "paged", "reuse_prefixes": False}
    llm = fw.LLM(model, dtype="bf16", max_context=context, max_sequences=most, kv_cache=cache, **chosen)

    def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
        sampling = llm.sampling(temperature=0, max_tokens=new, ignore_eos=True)
        begin = time.perf_counter()
        for number, prompt in enumerate(prompts):
            llm.engine.add(str(number), prompt, sampling)
        waiting = {str(number) for number in range(len(prompts))}
        first = begin
        while len(llm.engine):
            deltas, _ = llm.engine.step()
            if waiting:
                waiting -= {delta.key for delta in deltas}
                first = time.perf_counter()
        return first - begin, time.perf_counter() - first

    return run


def of_transformers(model: str, weights: str, context: int, most: int) -> Run:
    """`generate` with its own cache."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().to(device)

    def timed(prompts: list[list[int]], new: int) -> float:
        ids = torch.tensor(prompts, device=device)
        begin = time.perf_counter()
        theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
        ).cpu()
        return time.perf_counter() - begin

    return in_two(timed)


def of_llama_cpp(model: str, weights: str, context: int, most: int) -> Run:
    """Its own batches, without its server."""
    import llama_cpp as cpp
    import numpy as np

    file = Path(model) / f"{weights}.gguf"
    if not file.exists():
        from inference_gguf import write

        write(Path(model), file, weights)
    cpp.llama_backend_init()
    settings = cpp.llama_model_default_params()
    loaded = cpp.llama_model_load_from_file(str(file).encode(), settings)
    chosen = cpp.llama_context_default_params()
    chosen.n_ctx, chosen.n_batch, chosen.n_ubatch, chosen.n_seq_max = context * most, 512, 512, most
    chosen.n_threads = chosen.n_threads_batch = 2
    state = cpp.llama_init_from_model(loaded, chosen)
    vocabulary = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(loaded))
    batch = cpp.llama_batch_init(512, 0, 1)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """Tokens with position, sequence and whether what follows is wanted; what follows."""
        batch.n_tokens = len(tokens)
        for n, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0], batch.logits[n] = token, position, 1, sequence, wanted
        if cpp.llama_decode(state, batch):
            sys.exit("llama_decode failed")
        rows = [cpp.llama_get_logits_ith(state, n) for n, token in enumerate(tokens) if token[3]]
        return [int(np.argmax(np.ctypeslib.as_array(row, shape=(vocabulary,)))) for row in rows]

    def run(prompts: list[list[int]], new: int) -> tuple[float, float]:
        cpp.llama_memory_clear(cpp.llama_get_memory(state), True)
        begin = time.perf_counter()
        todo = [(token, at, n, at == len(prompt) - 1) for n, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        last: list[int] = []
        for at in range(0, len(todo), 512):
            last += decode(todo[at : at + 512])
        first = time.perf_counter()
        for step in range(new - 1):
            last = decode([(token, len(prompts[n]) + step, n, True) for n, token in enumerate(last)])
        return first - begin, time.perf_counter() - first

    return run


def of_vllm(model: str, weights: str, context: int, most: int) -> Run:
    """Its engine in this process, without its server."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="bfloat16", skip_tokenizer_init=True, max_model_len=context, max_num_seqs=most, enable_prefix_caching=False, seed=0
    )

    def timed(prompts: list[list[int]], new: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        begin = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - begin

    return in_two(timed)


PROGRAMS = {"fw": of_fw, "transformers": of_transformers, "llama_cpp": of_llama_cpp, "vllm": of_vllm}


def main(program: str, model: str, weights: str, prompt: str, new: str, *batches: str) -> None:
    """Each batch once to warm up, and once measured."""
    if importlib.util.find_spec(program) is None:
        sys.exit(NOT_INSTALLED)
    sizes = list(map(int, batches))
    numbers = random.Random(0)
    begin = time.perf_counter()
    run = PROGRAMS[program](model, weights, int(prompt) + int(new), max(sizes))
    run([[5, 6, 7]], 1)
    figures = {"start": time.perf_counter() - begin}
    for size in sizes:
        prompts = [[numbers.randrange(3, 30_000) for _ in range(int(prompt))] for _ in range(size)]
        run(prompts, 16)  # what is made once per size is there afterwards
        first, rest = run(prompts, int(new))
        figures[f"prefill {size}"] = size * int(prompt) / first
        figures[f"decode {size}"] = size * (int(new) - 1) / rest
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
