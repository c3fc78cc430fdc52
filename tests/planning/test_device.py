"""Plans for GPUs that are not here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from conftest import fw
from fw.config import load
from fw.errors import UserError
from fw.kernels import causal, differentiable, loss
from fw.meter.account import Block, History, Rules
from fw.meter.devices import DEVICES, MIB, find
from fw.meter.document import COMPONENTS
from fw.planning.ledger import Ledger
from fw.planning.on_gpu import allocator_peaks
from fw.planning.plan import device_of, plan
from fw.recipe import World, resolve

SYNTHETIC = ["data={name: synthetic, vocab_size: 300, samples: 64}", "train.global_batch_size=8", "train.micro_batch_size=4"]
CONTEXT, WORKSPACE = find("h200").context_bytes, find("h200").cublas_workspace_bytes


def test_the_document_is_of_the_device(workspace: Path) -> None:
    document = json.loads(fw("plan", "tiny.yaml", "--device", "h200", "--json", "precision=bf16", *SYNTHETIC).ok().out)
    (rank,) = document["per_rank"]
    assert document["device"] == "h200" and document["budget_bytes"] == find("h200").memory_bytes and document["fits"] is True
    assert sum(rank["components_at_peak"].values()) == rank["allocated_peak_bytes"] == rank["allocated_peak_low_bytes"]
    assert rank["reserved_peak_bytes"] > rank["allocated_peak_bytes"] and rank["reserved_peak_bytes"] % (2 * MIB) == 0
    assert rank["driver_peak_bytes"] == rank["reserved_peak_bytes"] + CONTEXT
    rounding = rank["components_max"]["other_bytes"] - 2 * WORKSPACE
    assert 0 <= rounding < 2 * MIB, "workspaces of forward's thread and of backward's, and what blocks are not filled with"
    assert 0 < document["step_time_s"] < 1
    table = fw("plan", "tiny.yaml", "--device", "h200", *SYNTHETIC).ok().out
    assert "estimate" in table and "reserved" in table and "more than tensors take" in table


@pytest.mark.parametrize("sharding", ["ddp", "fsdp"])
def test_one_rank_has_a_communicator_too(workspace: Path, sharding: str) -> None:
    found = fw("plan", "tiny.yaml", "--device", "h200", "--json", f"sharding={sharding}", *SYNTHETIC).ok().out
    (rank,) = json.loads(found)["per_rank"]
    assert rank["driver_peak_bytes"] == rank["reserved_peak_bytes"] + CONTEXT + 579 * MIB


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_where_no_rule_is_about_it_tensors_take_what_they_do_on_the_cpu(
    workspace: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But cuBLAS' workspaces, and what is in host memory: the state of a generator, and the batch read ahead (tokens and labels). The CPU's
    own kernels are for the CPU alone."""
    for kernels in (causal, differentiable, loss):
        monkeypatch.setattr(kernels, "of_cpu", lambda *tensors: False)
    overrides = [*SYNTHETIC, "attention=eager", f"precision={precision}"]
    gpu, cpu = (plan("tiny.yaml", *overrides, device=device).largest for device in ("h200", "cpu"))
    on_host = torch.get_rng_state().numel() + 2 * 8 * 64 * 8
    rounding = gpu.at_peak["other"] - cpu.at_peak["other"] - 2 * WORKSPACE + on_host
    assert gpu.allocated_peak == cpu.allocated_peak + 2 * WORKSPACE - on_host + rounding and 0 <= rounding < 2 * MIB
    assert gpu.peak_phase == cpu.peak_phase
    for component in set(COMPONENTS) - {"other"}:
        assert gpu.most[component] == cpu.most[component], component


def test_a_file_describes_a_device(workspace: Path) -> None:
    tree = {**asdict(find("rtx3090")), "memory_bytes": "48MiB", "compute_capability": [8, 6], "context_bytes": "10MiB"}
    Path("mine.yaml").write_text(yaml.safe_dump({key: value for key, value in tree.items() if key != "name"}))
    document = plan("tiny.yaml", *SYNTHETIC, device="mine.yaml")
    assert document.device == "mine" and document.budget == 48 * MIB
    assert document.largest.driver_peak == document.largest.reserved_peak + 10 * MIB
    assert document.fits is (document.largest.driver_peak <= 48 * MIB)


def test_a_gpu_that_nobody_knows_is_told_of(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = resolve(load("tiny.yaml", ["launch.accelerator=auto"]), World(), starts=False)
    assert device_of(recipe, pytest.fail) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Nothing 9000")
    said: list[str] = []
    assert device_of(recipe, said.append) is None
    assert len(said) == 1 and said[0].startswith("warning: NVIDIA Nothing 9000 is none of the GPUs that fw knows")


def test_the_devices_memory_is_the_budget_unless_one_is_set(workspace: Path) -> None:
    assert fw("plan", "tiny.yaml", "--device", "h200", "--strict", "memory.budget=1MiB", *SYNTHETIC).code == 3
    more = json.loads(fw("plan", "tiny.yaml", "--device", "rtx4090", "memory.budget=24GiB", "--json", *SYNTHETIC).ok().out)
    assert more["budget_bytes"] == find("rtx4090").memory_bytes < 24 << 30, "no card has all that its name says"
    assert fw("plan", "tiny.yaml", "--device", "rtx2080ti", "--strict", *SYNTHETIC).code == 0
    large = plan("tiny.yaml", *SYNTHETIC, "model.hidden_size=4096", "model.num_hidden_layers=24", device="rtx2080ti")
    assert large.fits is False


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--device", "h300"], "device 'h300' is not known; did you mean 'h200'?"),
        (["--device", "absent.yaml"], "absent.yaml"),
        (["--device", "a100-80gb", "precision={name: fp8, emulate: false}"], "need a GPU of compute capability"),
        (
            ["--device", "h200", "sharding=fsdp", *(f"offload.{part}=cpu" for part in ("params", "gradients", "optimizer"))],
            "offload.params",
        ),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(workspace: Path, arguments: list[str], words: str) -> None:
    done = fw("plan", "tiny.yaml", *arguments, *SYNTHETIC)
    assert done.code == 2 and words in done.err and "Traceback" not in done.err
    assert "h300" not in words or all(name in done.err for name in (*DEVICES, "cpu"))


def test_refusals_are_those_of_the_device(workspace: Path) -> None:
    overrides = [*SYNTHETIC, "precision={name: fp8, emulate: false}"]
    assert plan("tiny.yaml", *overrides, device="h200").fits
    with pytest.raises(UserError, match="need a GPU of compute capability"):
        plan("tiny.yaml", *overrides, device="cpu")


def test_ranks_have_communicators(workspace: Path) -> None:
    for ranks, nbytes in ((2, 544 * 10**6), (4, 688 * 10**6)):
        document = plan("tiny.yaml", *SYNTHETIC, "train.micro_batch_size=2", "sharding=fsdp", world_size=ranks, device="h200")
        assert document.largest.driver_peak == document.largest.reserved_peak + CONTEXT + nbytes
        assert document.largest.most["communication"] > 0


def test_what_is_offloaded_is_in_host_memory(workspace: Path) -> None:
    here = plan("tiny.yaml", *SYNTHETIC, device="h200").largest
    state = here.most["optimizer"]
    away = plan("tiny.yaml", *SYNTHETIC, "offload.optimizer=cpu", device="h200").largest
    assert away.most["optimizer"] < 1024 < state and away.allocated_peak <= here.allocated_peak
    activations = ["offload.activations=cpu", "offload.activations_above=1KiB"]
    kept = plan("tiny.yaml", *SYNTHETIC, *activations, "model.num_hidden_layers=6", device="h200").largest
    all_here = plan("tiny.yaml", *SYNTHETIC, "model.num_hidden_layers=6", device="h200").largest
    assert kept.most["activations"] < 0.7 * all_here.most["activations"]


@pytest.mark.parametrize("device, copies", [("cpu", 1), ("h200", 4)])
def test_optimizers_take_lists_of_tensors_where_cuda_would(device: str, copies: int) -> None:
    with Ledger(None if device == "cpu" else find(device)) as ledger:
        parameters = [torch.nn.Parameter(torch.empty(256, 256)) for _ in range(4)]
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with ledger.recording(torch.device("cpu"), Rules()) as found:
            optimizer.step()
    start = sum(block.nbytes for block in found.history.before)
    assert found.history.account().peak_bytes - start == copies * 4 * 256 * 256, "gradients with the decay added"


def test_reserved_by_hand() -> None:
    first, second = History(before=[weight := Block(600 * 1024)]), History()
    first.came(passing := Block(3 * MIB))
    first.went(passing)
    second.before = [weight, between := Block(12 * MIB)]
    second.came(more := Block(9 * MIB))
    small, shared = 2 * MIB, 20 * MIB
    assert allocator_peaks([first]).reserved == small + shared
    first.changes.clear()
    first.came(passing)
    first.went(passing)
    # 12 MiB fit into the free segment of 20, and 9 then do not fit into what is left of it.
    assert allocator_peaks([first, second]).reserved == small + 2 * shared
    beside = History(before=[weight, between, more], changes=[(Block(1, stream=1), 1)])
    assert allocator_peaks([first, second, beside]).reserved == small + 2 * shared + small, "another stream has its own segments"
    second.went(more)
    second.went(between)
    second.came(Block(18 * MIB))
    assert allocator_peaks([first, second]).reserved == small + 2 * shared


def test_a_count_of_steps_lies_where_the_optimizer_makes_it(workspace):
    """fw's own keep it in host memory, one for each parameter; torch's fused kernel has it on the GPU."""
    state = {}
    for optimizer in ("lamb", "adamw"):
        document = json.loads(fw("plan", "tiny.yaml", "--device", "h200", "--json", f"optimizer={optimizer}", *SYNTHETIC).ok().out)
        most = document["per_rank"][0]["components_max"]
        state[optimizer] = most["optimizer_bytes"] - 2 * most["parameters_bytes"]
    parameters = 2 * 9 + 3
    assert state == {"lamb": 0, "adamw": 4 * parameters}
