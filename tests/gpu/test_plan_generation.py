"""What generating on the GPU that is here is planned to take, against what torch's allocator says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from conftest import environment
from fw.config import Config, overridden
from fw.meter.devices import MIB, of_product
from fw.planning.generation import gpu_here, plan_generation
from fw.recipe.inference import resolve_inference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CASES = {
    "bf16": ["inference.dtype=bf16"],
    "fp32": ["inference.dtype=fp32"],
    "without recordings": ["inference.dtype=bf16", "inference.replay=false"],
    "keys and values in 8 bits": ["inference.dtype=bf16", "kv_cache=quantized"],
    "weights in 8 bits": ["inference.dtype=bf16", "quantization={name: w8a16, group_size: -1}"],
    "contiguous": ["inference.dtype=bf16", "kv_cache=contiguous"],
}

MEASURED = """
import json, sys
import torch
from fw.config import Config, overridden
from fw.inference.prepare import prepare
from fw.inference.steady import sizes_on_gpu
from fw.inference.warm_up import warm_up
from fw.planning.worst_step import WorstStep
from fw.recipe.inference import resolve_inference

recipe = resolve_inference(overridden(Config("test", {}, {}), sys.argv[2:]))
prepared = prepare(sys.argv[1], recipe, None, lambda told: None)
load = torch.cuda.max_memory_allocated()
torch.cuda.reset_peak_memory_stats()
warm_up(prepared.own.runner, prepared.own.cache, prepared.own.context, sizes_on_gpu(recipe.inference.max_sequences))
WorstStep(prepared, recipe).run()
torch.cuda.synchronize()
weights = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in prepared.own.model.parameters()}.values())
taken = {"load": load, "allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(), "weights": weights}
print(json.dumps(taken))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of layers large enough that segments are made to their measure."""
    place = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    config = LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, **heads)
    LlamaForCausalLM(config).save_pretrained(place)
    return place


@pytest.mark.parametrize("case", CASES)
def test_it_takes_what_was_planned(directory: Path, case: str, record_property: Callable[[str, object], None]) -> None:
    if of_product(torch.cuda.get_device_name()) is None:
        pytest.skip("a GPU that fw.meter.devices does not know")
    words = ["inference.device=cuda", "inference.kv_budget=256MiB", "inference.max_sequences=16", *CASES[case]]
    recipe = resolve_inference(overridden(Config("test", {}, {}), words))
    planned = plan_generation(directory, recipe, gpu=gpu_here(recipe)).largest
    process = [sys.executable, "-c", MEASURED, str(directory), *words]
    done = subprocess.run(process, env=environment(), capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout.splitlines()[-1])
    record_property("measured", json.dumps(measured))
    record_property("planned", json.dumps(planned.as_json()))
    assert measured["weights"] == pytest.approx(planned.at_peak["parameters"], rel=1e-3)
    assert measured["load"] == pytest.approx(planned.phases["load"].allocated_peak, rel=0.03, abs=2 * MIB)
    assert measured["allocated"] == pytest.approx(planned.allocated_peak, rel=0.03, abs=2 * MIB)
    assert measured["reserved"] == pytest.approx(planned.reserved_peak, rel=0.1, abs=22 * MIB)
