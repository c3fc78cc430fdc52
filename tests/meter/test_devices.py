"""The devices that are known, those from a file, and what is told of a wrong one."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from fw.config.yaml_source import dump
from fw.errors import UserError
from fw.meter import devices, flops
from fw.meter.devices import DEVICES, DTYPES, find

GIB, MIB = 1024**3, 1024**2

ASKED = ("h200", "h100-80gb", "a100-80gb", "a100-40gb", "v100-32gb", "rtx4090", "rtx3090", "rtx2080ti")

OWN = {
    "memory_bytes": "94GiB",
    "compute_capability": [9, 0],
    "peak_flops": {"float32": 60e12, "bfloat16": 835e12},
    "memory_bandwidth": 3.9e12,
    "link_bandwidth": 300e9,
    "network_bandwidth": 50e9,
    "host_bandwidth": 63e9,
    "context_bytes": "500MiB",
    "cublas_workspace_bytes": 32 * MIB,
}


@pytest.fixture
def write(tmp_path):
    def write(**changes):
        file = tmp_path / "nvl.yaml"
        file.write_text(dump({key: value for key, value in {**OWN, **changes}.items() if value is not None}))
        return str(file)

    return write


@pytest.mark.parametrize("name", ASKED)
def test_the_usual_devices_are_known(name):
    assert find(name).name == name


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_a_row_is_of_one_piece(device):
    """What no data sheet contradicts: a figure in the wrong place or unit breaks it."""
    nominal = {"h200": 141e9, "l40s": 48 * GIB, "rtx4090": 24 * GIB, "rtx3090": 24 * GIB, "rtx2080ti": 11 * GIB}
    gigabytes = nominal.get(device.name) or int(device.name.split("-")[-1].removesuffix("gb")) * GIB
    assert 0.92 * gigabytes < device.memory_bytes < 1.07 * gigabytes
    peaks = device.peak_flops
    assert set(peaks) <= set(DTYPES)
    assert ("tf32" in peaks) == ("bfloat16" in peaks) == (device.compute_capability >= (8, 0))
    assert ("float8" in peaks) == (device.compute_capability >= (8, 9))
    assert 10e12 < peaks["float32"] <= peaks.get("tf32", peaks["float32"]) < peaks["float16"]
    assert peaks.get("bfloat16", peaks["float16"]) == peaks["float16"] < peaks.get("float8", 1e18)
    assert device.memory_bandwidth > 4 * device.link_bandwidth >= 4 * device.host_bandwidth > 4 * 10e9
    assert device.network_bandwidth < device.host_bandwidth
    assert 200 * MIB < device.context_bytes < GIB
    assert device.cublas_workspace_bytes == (32 * MIB if device.compute_capability[0] == 9 else 8.125 * MIB)


@pytest.mark.parametrize(
    ("product", "half", "full"),
    [
        ("NVIDIA H200", 989e12, 494e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 494e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 156e12),
        ("NVIDIA A100-SXM4-40GB", 312e12, 156e12),
        ("NVIDIA L40S", 362e12, 183e12),
        ("Tesla V100-SXM2-32GB", 125e12, 15.7e12),
        ("NVIDIA GeForce RTX 4090", 165e12, 82.6e12),
        ("NVIDIA GeForce RTX 3090", 71e12, 35.6e12),
        ("NVIDIA GeForce RTX 2080 Ti", 53.8e12, 13.4e12),
    ],
)
def test_utilization_is_a_share_of_the_data_sheet(monkeypatch, product, half, full):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: product)
    device = torch.device("cuda", 0)
    assert flops.peak_flops(device, torch.float32) == full
    for dtype in (torch.bfloat16, torch.float16):
        assert flops.peak_flops(device, dtype) == half


@pytest.mark.parametrize("has_bf16", [True, False])
def test_what_a_processor_has_no_products_in_is_not_measured(monkeypatch, has_bf16):
    """Torch's loops in it would take tens of seconds before the first step, and be no peak."""
    asked = []
    monkeypatch.setattr(flops, "multiplies", lambda dtype: has_bf16 and dtype == torch.bfloat16)
    monkeypatch.setattr(flops, "_of_products", lambda device, dtype, threads: asked.append(dtype) or 1.0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        flops.peak_flops(torch.device("cpu"), dtype)
    assert asked == [torch.float32, torch.bfloat16 if has_bf16 else torch.float32, torch.float32]


def test_products_have_their_memory():
    assert devices.of_product("NVIDIA A100-SXM4-40GB") is find("a100-40gb")
    assert devices.of_product("NVIDIA A100-SXM4-80GB") is find("a100-80gb")
    assert devices.of_product("Radeon") is None


def test_a_file_describes_a_device(write):
    device = find(write())
    assert device.name == "nvl"
    assert device.memory_bytes == 94 * GIB
    assert device.context_bytes == 500 * MIB
    assert device.compute_capability == (9, 0)
    assert device.peak_flops == {"float32": 60e12, "bfloat16": 835e12}
    assert find(write(name="mine")).name == "mine"


def test_a_known_device_written_down_is_the_same_one(tmp_path):
    known = find("h100-80gb")
    file = tmp_path / "copy.yml"
    file.write_text(dump(asdict(known)))
    assert find(str(file)) == known


def test_an_unknown_name_is_told_with_those_there_are():
    with pytest.raises(UserError, match=r"device 'h100-80g' is not known; did you mean 'h100-80gb'\?") as raised:
        find("h100-80g")
    assert all(name in str(raised.value) for name in ASKED)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match=r"none\.yaml: no such file"):
        find(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"memory_byte": 1}, r"nvl\.yaml:14: unknown key 'memory_byte'; did you mean 'memory_bytes'\?"),
        ({"host_bandwidth": None, "context_bytes": None}, r"nvl\.yaml: a device needs host_bandwidth, context_bytes"),
        ({"name": 7}, r"nvl\.yaml:14: name: 7 is not a name"),
        ({"memory_bytes": "80 gigs"}, r"nvl\.yaml:1: memory_bytes: '80 gigs' is not a size"),
        ({"memory_bytes": 1.5}, r"nvl\.yaml:1: memory_bytes: 1\.5 is not a size"),
        ({"memory_bytes": True}, r"nvl\.yaml:1: memory_bytes: True is not a size"),
        ({"memory_bytes": 0}, r"nvl\.yaml:1: memory_bytes: 0 is too small"),
        ({"context_bytes": -1}, r"context_bytes: -1 is too small"),
        ({"compute_capability": 9.0}, r"nvl\.yaml:2: compute_capability: 9\.0 is not a major and a minor version"),
        ({"compute_capability": [9, True]}, r"compute_capability: \[9, True\] is not"),
        ({"peak_flops": 1e15}, r"peak_flops: 1000000000000000\.0 does not give FLOP/s of float32"),
        ({"peak_flops": {"bfloat16": 1e15}}, r"peak_flops: .* does not give FLOP/s of float32"),
        ({"peak_flops": {"float32": 1e13, "bfloat61": 1e15}}, r"peak_flops: unknown dtype 'bfloat61'; did you mean 'bfloat16'\?"),
        ({"peak_flops": {"float32": "fast"}}, r"peak_flops\.float32: 'fast' is not a number above 0"),
        ({"memory_bandwidth": 0}, r"memory_bandwidth: 0 is not a number above 0"),
        ({"link_bandwidth": float("inf")}, r"link_bandwidth: inf is not a number above 0"),
        ({"network_bandwidth": True}, r"network_bandwidth: True is not a number above 0"),
    ],
)
def test_a_wrong_file_is_told_with_its_place(write, changes, said):
    with pytest.raises(UserError, match=said):
        find(write(**changes))
