"""Plans for the GPU that is here, against what torch's allocator and the driver say of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import fw
from fw.meter.devices import MIB, of_product
from fw.meter.document import MemoryDocument, RankMemory
from fw.planning.plan import plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = "launch.accelerator=cuda"
LARGE = [
    "data={name: synthetic, vocab_size: 4096, samples: 64}",
    "model.hidden_size=512",
    "model.intermediate_size=1536",
    "model.num_attention_heads=8",
    "model.num_hidden_layers=6",
    "train.global_batch_size=8",
    "train.micro_batch_size=4",
    "train.sequence_length=512",
    "train.max_steps=4",
]
CASES = {
    "fp32": ["precision=fp32"],
    "fp32, no groups": ["precision=fp32", "model.num_key_value_heads=8"],
    "bf16": ["precision=bf16"],
    "bf16, wide heads": ["precision=bf16", "model.num_attention_heads=2", "model.num_key_value_heads=2"],
    "bf16_true, adamw_8bit": ["precision=bf16_true", "optimizer=adamw_8bit"],
    "full": ["precision=bf16", "activation=full"],
    "selective": ["precision=bf16", "activation=selective"],
    "chunked loss": ["precision=bf16", "objective.chunk_tokens=256"],
    "sgd": ["precision=bf16", "optimizer={name: sgd, momentum: 0.9, weight_decay: 0.1}"],
    "eager": ["precision=bf16", "attention=eager"],
    "packed": ["precision=bf16", "data={name: synthetic, vocab_size: 4096, samples: 256, min_length: 64}", "train.packing=true"],
    "gpt2": ["precision=bf16", "model={name: gpt2, n_layer: 4, n_head: 8, n_embd: 512}"],
    "optimizer on the host": ["precision=bf16", "offload.optimizer=cpu"],
    "activations on the host": ["precision=bf16", "offload.activations=cpu"],
    "fsdp": ["precision=bf16", "sharding=fsdp"],
    "every_n": ["precision=bf16", "activation=every_n"],
    "ratio in fp32": ["precision=fp32", "activation={name: ratio, ratio: 0.5}"],
    "update in backward": [
        "precision=bf16",
        "train.global_batch_size=4",
        "optimizer={name: adamw, in_backward: true}",
        "train.gradient_clip_norm=0",
    ],
    "average": ["precision=bf16", "train.ema_decay=0.9"],
    "adafactor": ["precision=bf16", "optimizer=adafactor"],
    "muon": ["precision=bf16", "optimizer=muon"],
    "lion in 8 bits, three micro-batches": ["precision=bf16", "optimizer=lion_8bit", "train.global_batch_size=12"],
    "lora": ["precision=bf16", "peft=lora"],
    "lora, base on the host": ["precision=bf16", "peft=lora", "offload.params=cpu"],
    "lora, some of the base on the host": ["precision=bf16", "peft=lora", "offload={params: cpu, modules: ['*.[135].*']}"],
    "dora, full": ["precision=bf16", "peft=dora", "activation=full"],
    "qlora": ["precision=bf16", "peft=lora", "quantization=nf4"],
    "qwen3": ["precision=bf16", "model={name: qwen3, hidden_size: 512, num_hidden_layers: 4, num_attention_heads: 8}"],
    "mixtral": ["precision=bf16", "model={name: mixtral, hidden_size: 512, num_hidden_layers: 3, num_attention_heads: 8}"],
}
_OWN_SHAPE = ("gpt2", "qwen3", "mixtral")


@pytest.fixture(autouse=True)
def known_gpu() -> None:
    if of_product(torch.cuda.get_device_name()) is None:
        pytest.skip("a GPU that fw.meter.devices does not know")


def run_and_plan(case: str, record: Callable[[str, object], None]) -> tuple[int, RankMemory, MemoryDocument]:
    """The most bytes allocated in the run, what its measured step took, and its plan; all recorded, for the figures of a report."""
    if case == "qlora":
        pytest.importorskip("bitsandbytes")
    own = [option for option in LARGE if case not in _OWN_SHAPE or not option.startswith("model.")]
    overrides = [CUDA, *own, *CASES[case]]
    fw("train", "tiny.yaml", "memory.measure_step=2", "train.run_dir=run", *overrides).ok()
    most = int(json.loads(Path("run/summary.json").read_text())["peak_memory_bytes"])
    measured = MemoryDocument.from_json(json.loads(Path("run/memory.json").read_text())).largest
    document = plan("tiny.yaml", *overrides)
    record("measured", json.dumps({"allocated_peak_of_the_run": most, **measured.as_json()}))
    record("planned", json.dumps(document.largest.as_json()))
    return most, measured, document


@pytest.mark.parametrize("case", CASES)
def test_the_run_takes_what_was_planned(workspace: Path, case: str, record_property: Callable[[str, object], None]) -> None:
    most, measured, document = run_and_plan(case, record_property)
    planned = document.largest
    assert document.device != "cpu" and document.budget == torch.cuda.get_device_properties(0).total_memory
    # max_memory_allocated counts what the allocator rounds up, cuBLAS' workspaces, and the first step.
    assert most == pytest.approx(planned.allocated_peak, rel=0.03, abs=2 * MIB)
    for component in ("parameters", "gradients"):
        assert measured.most[component] == planned.most[component], component
    # An optimizer on the host counts its steps there, which a plan does not tell from a count beside the parameters.
    assert measured.most["optimizer"] == pytest.approx(planned.most["optimizer"], abs=1024)
    assert measured.most["activations"] == pytest.approx(planned.most["activations"], rel=0.03, abs=MIB)
    assert measured.reserved_peak == pytest.approx(planned.reserved_peak, rel=0.1, abs=22 * MIB)


@pytest.mark.alone
@pytest.mark.parametrize("case", ["bf16", "fsdp", "gpt2", "qlora"])
def test_the_driver_gives_out_what_was_planned(workspace: Path, case: str, record_property: Callable[[str, object], None]) -> None:
    pytest.importorskip("pynvml", reason="only NVML says what others have without taking something itself")
    others = torch.cuda.device_memory_used()
    _, measured, document = run_and_plan(case, record_property)
    record_property("others", others)
    assert measured.driver_peak - others == pytest.approx(document.largest.driver_peak, rel=0.1, abs=400 * MIB)


@pytest.mark.alone
def test_no_step_is_faster_than_planned(workspace: Path) -> None:
    overrides = [CUDA, *LARGE, "precision=bf16"]
    measured = MemoryDocument.from_json(json.loads(fw("profile", "tiny.yaml", "--json", *overrides).ok().out))
    planned = plan("tiny.yaml", *overrides)
    assert measured.step_time is not None and planned.step_time is not None
    assert planned.step_time < measured.step_time
