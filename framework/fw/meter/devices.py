"""What GPUs have and how fast they are by their vendor's data sheets, for plans without the GPU and for model FLOPs utilization."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

from fw.config.origin import Origin
from fw.config.size import parse_size
from fw.config.yaml_source import read_file
from fw.errors import UserError, did_you_mean
from fw.planned import PlannedGPU

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8")
"""What peaks are known by; ``float32`` is without TF32."""

MIB = 1024**2

# Bytes per second each way over 16 lanes: 8, 16 and 32 GT/s with 128 of 130 bits used (PCI-SIG). Data sheets give both ways together,
# rounded up: 32, 64 and 128 GB/s.
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9

# torch's CUBLAS_WORKSPACE_CONFIG where the variable is not set: :4096:8 on compute capability 9, :4096:2:16:8 before it, both in KiB
# (getChosenWorkspaceSize in pytorch's aten/src/ATen/cuda/CublasHandlePool.cpp).
_WORKSPACE = (2 * 4096 + 8 * 16) * 1024
_WORKSPACE_HOPPER = 8 * 4096 * 1024

# What nvidia-smi shows for a process of torch that has allocated nothing, with kernels loaded lazily (CUDA 11.7 and later); each kernel
# used adds to it.
_CONTEXT_HOPPER = 203 * MIB  # measured on an H200 after a training run in bf16, torch 2.11 with CUDA 13.0 (docs/gpu.md)
_CONTEXT_ADA = 426 * MIB  # RTX 6000 Ada, torch 2.10 with CUDA 13.0: unslothai/unsloth-zoo#1053
_CONTEXT_AMPERE = 400 * MIB  # "around 400MB", GPU not named: pytorch/pytorch#109888
_CONTEXT_GA102 = 256 * MIB  # RTX 3090, torch 2.7.1 with CUDA 12.8: invoke-ai/InvokeAI#9413
_CONTEXT_OLD = 300 * MIB  # "~300MB", GPU not named: pytorch/pytorch#107667

# The network that the vendor's own hosts give each GPU. For hosts of others, 200 Gbit/s (data centre cards) and 25 Gbit/s (consumer cards)
# are assumptions.
_NDR, _HDR, _EDR, _ETHERNET = 400e9 / 8, 200e9 / 8, 100e9 / 8, 25e9 / 8


@dataclass(frozen=True)
class Device:
    """A GPU in a usual host.

    Bandwidths are bytes per second one way, the physical peak. What is not in a data sheet (``network_bandwidth``, ``context_bytes``) is a
    typical value: a YAML file with the same keys says better for one's own machine.

    Attributes:
        memory_bytes: what CUDA reports in all (``torch.cuda.get_device_properties(0).total_memory``), some less than the nominal size;
            driver versions differ by some 0.1 %.
        compute_capability: major and minor.
        peak_flops: dense FLOP/s (without sparsity) by dtype, those of :data:`DTYPES` that the GPU has; products of 16 and 8 bits are summed
            in float32.
        memory_bandwidth: of the GPU's own memory, reading and writing together.
        link_bandwidth: to the other GPUs of the host together: NVLink, or PCIe where there is none.
        network_bandwidth: for each GPU to other hosts.
        host_bandwidth: to the host's memory, over PCIe.
        context_bytes: memory of the driver for a process: CUDA context and kernels, which no allocator counts.
        cublas_workspace_bytes: what torch allocates for cuBLAS, through its caching allocator, for each handle and stream.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    context_bytes: int
    cublas_workspace_bytes: int

    @property
    def operator_seconds(self) -> float:
        """None: a GPU computes while the host starts what follows."""
        return 0.0


# Each row: name, memory, compute capability; peaks; bandwidth of memory, link, network and host; context; cuBLAS workspace.
# fmt: off
DEVICES: Mapping[str, Device] = {device.name: device for device in (
    # NVIDIA H200 data sheet (SXM5): the processor of H100 SXM, 141 GB HBM3e at 4.8 TB/s. Memory: 143156 MiB as torch printed it.
    # Network here and for H100: one ConnectX-7 port of 400 Gbit/s for each GPU (DGX H100/H200 user guide).
    Device("h200", 143156 * MIB, (9, 0),
           {"float32": 67e12, "tf32": 494e12, "bfloat16": 989e12, "float16": 989e12, "float8": 1979e12},
           4.8e12, 900e9 / 2, _NDR, _PCIE_5, _CONTEXT_HOPPER, _WORKSPACE_HOPPER),
    # NVIDIA H100 data sheet (SXM5), whose tensor peaks are with sparsity, twice these. Memory: 81082 MiB as torch 2.0.1 printed it.
    Device("h100-80gb", 81082 * MIB, (9, 0),
           {"float32": 67e12, "tf32": 494e12, "bfloat16": 989e12, "float16": 989e12, "float8": 1979e12},
           3.35e12, 900e9 / 2, _NDR, _PCIE_5, _CONTEXT_HOPPER, _WORKSPACE_HOPPER),
    # NVIDIA H100 data sheet (PCIe), without an NVLink bridge. Memory: 81008 MiB as torch printed it.
    Device("h100-pcie-80gb", 81008 * MIB, (9, 0),
           {"float32": 51e12, "tf32": 378e12, "bfloat16": 756e12, "float16": 756e12, "float8": 1513e12},
           2e12, _PCIE_5, _HDR, _PCIE_5, _CONTEXT_HOPPER, _WORKSPACE_HOPPER),
    # NVIDIA A100 data sheet (SXM4). Memory: 79.25 GiB in torch's message of levihsu/OOTDiffusion#235, which names an A100.
    # Network: one ConnectX-6 port of 200 Gbit/s for each GPU (DGX A100 user guide).
    Device("a100-80gb", int(79.25 * 1024) * MIB, (8, 0),
           {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12},
           2.039e12, 600e9 / 2, _HDR, _PCIE_4, _CONTEXT_AMPERE, _WORKSPACE),
    # The same. Memory: 42298834944 bytes by CUDA's deviceQuery in bottlerocket-os/bottlerocket#3873.
    Device("a100-40gb", 42298834944, (8, 0),
           {"float32": 19.5e12, "tf32": 156e12, "bfloat16": 312e12, "float16": 312e12},
           1.555e12, 600e9 / 2, _HDR, _PCIE_4, _CONTEXT_AMPERE, _WORKSPACE),
    # NVIDIA L40S data sheet. Memory: 45589 MiB as torch printed it.
    Device("l40s", 45589 * MIB, (8, 9),
           {"float32": 91.6e12, "tf32": 183e12, "bfloat16": 362e12, "float16": 362e12, "float8": 733e12},
           864e9, _PCIE_4, _HDR, _PCIE_4, _CONTEXT_ADA, _WORKSPACE),
    # NVIDIA V100 data sheet (SXM2); no TF32 and no bfloat16. Memory: 32510 MiB as torch printed it for the PCIe card.
    # Network: four ports of 100 Gbit/s for eight GPUs (DGX-1 user guide).
    Device("v100-32gb", 32510 * MIB, (7, 0),
           {"float32": 15.7e12, "float16": 125e12},
           900e9, 300e9 / 2, _EDR / 2, _PCIE_3, _CONTEXT_OLD, _WORKSPACE),
    # NVIDIA Ada GPU architecture white paper, appendix A. Memory: 23.64 GiB in torch's message of ali-vilab/VGen#104.
    Device("rtx4090", int(23.64 * 1024) * MIB, (8, 9),
           {"float32": 82.6e12, "tf32": 82.6e12, "bfloat16": 165e12, "float16": 165e12, "float8": 330e12},
           1.008e12, _PCIE_4, _ETHERNET, _PCIE_4, _CONTEXT_ADA, _WORKSPACE),
    # NVIDIA Ampere GA102 white paper, without an NVLink bridge. Memory: 24268 MiB as torch printed it.
    Device("rtx3090", 24268 * MIB, (8, 6),
           {"float32": 35.6e12, "tf32": 35.6e12, "bfloat16": 71e12, "float16": 71e12},
           936e9, _PCIE_4, _ETHERNET, _PCIE_4, _CONTEXT_GA102, _WORKSPACE),
    # NVIDIA Turing white paper, reference card without an NVLink bridge; no TF32 and no bfloat16. Memory: 11019 MiB as torch printed it.
    Device("rtx2080ti", 11019 * MIB, (7, 5),
           {"float32": 13.4e12, "float16": 53.8e12},
           616e9, _PCIE_3, _ETHERNET, _PCIE_3, _CONTEXT_OLD, _WORKSPACE),
)}
# fmt: on

# What is in the name that the driver gives a GPU; the first that fits.
_PRODUCTS = {
    "H200": "h200",
    "H100 PCIe": "h100-pcie-80gb",
    "H100": "h100-80gb",
    "A100-SXM4-40GB": "a100-40gb",
    "A100-PCIE-40GB": "a100-40gb",
    "A100": "a100-80gb",
    "L40S": "l40s",
    "V100": "v100-32gb",
    "RTX 4090": "rtx4090",
    "RTX 3090": "rtx3090",
    "RTX 2080 Ti": "rtx2080ti",
}


def find(name: str, *others: str) -> Device:
    """The device of that name, or the one that a YAML file of that path describes with :class:`Device`'s fields as keys.

    In a file, bytes may be written as ``80GiB``, and ``name`` may be left out: it is the file's then.

    Args:
        others: names that whoever asks takes besides, for the error.

    Raises:
        UserError: there is no such device or file, or the file has an unknown key, lacks one, or has a value of the wrong type.
    """
    if name in DEVICES:
        return DEVICES[name]
    if Path(name).suffix in (".yaml", ".yml"):
        return _read(Path(name))
    known = ", ".join((*DEVICES, *others))
    raise UserError(
        f"device '{name}' is not known{did_you_mean(name, (*DEVICES, *others))} (there are {known}, or the path of a YAML file)"
    )


def of_product(product: str) -> Device | None:
    """The device that the driver calls ``product`` (``torch.cuda.get_device_name``), or one that computes alike.

    Its memory may be of another size. None where no device is known by that name.
    """
    return next((DEVICES[name] for part, name in _PRODUCTS.items() if part in product), None)


def on_device(device: Device) -> PlannedGPU:
    """For whoever is asked before there are tensors."""
    return PlannedGPU(device.name, device.compute_capability, lambda tensor: False)


def _read(file: Path) -> Device:
    tree, origins = read_file(file)
    known = [field.name for field in fields(Device)]
    for key in tree:
        if key not in known:
            raise UserError(f"{origins[(key,)]}: unknown key '{key}'{did_you_mean(key, known)} (a device has: {', '.join(known)})")
    values = {"name": file.stem, **tree}
    missing = [key for key in known if key not in values]
    if missing:
        raise UserError(f"{file}: a device needs {', '.join(missing)}")
    return Device(**{key: _TYPES[key](values[key], key, origins.get((key,), Origin(str(file)))) for key in known})


def _text(value: Any, key: str, origin: Origin) -> str:
    if isinstance(value, str) and value:
        return value
    raise UserError(f"{origin}: {key}: {value!r} is not a name")


def _bytes(value: Any, key: str, origin: Origin) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UserError(f"{origin}: {key}: {value!r} is not a size; write it like 80GiB or as a number of bytes")
    try:
        nbytes = parse_size(value)
    except UserError as error:
        raise UserError(f"{origin}: {key}: {error}") from None
    if nbytes < 0 or (nbytes == 0 and key == "memory_bytes"):
        raise UserError(f"{origin}: {key}: {value!r} is too small")
    return nbytes


def _rate(value: Any, key: str, origin: Origin) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise UserError(f"{origin}: {key}: {value!r} is not a number above 0; write it per second, like 3.35e12")
    return float(value)


def _capability(value: Any, key: str, origin: Origin) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value):
        return value[0], value[1]
    raise UserError(f"{origin}: {key}: {value!r} is not a major and a minor version; write it like [9, 0]")


def _peaks(value: Any, key: str, origin: Origin) -> dict[str, float]:
    if not isinstance(value, Mapping) or "float32" not in value:
        raise UserError(f"{origin}: {key}: {value!r} does not give FLOP/s of float32; write it like {{float32: 67e12, bfloat16: 989e12}}")
    for dtype in value:
        if dtype not in DTYPES:
            raise UserError(f"{origin}: {key}: unknown dtype '{dtype}'{did_you_mean(dtype, DTYPES)} (there are {', '.join(DTYPES)})")
    return {dtype: _rate(peak, f"{key}.{dtype}", origin) for dtype, peak in value.items()}


_TYPES: Mapping[str, Callable[[Any, str, Origin], Any]] = {
    "name": _text,
    "memory_bytes": _bytes,
    "compute_capability": _capability,
    "peak_flops": _peaks,
    "memory_bandwidth": _rate,
    "link_bandwidth": _rate,
    "network_bandwidth": _rate,
    "host_bandwidth": _rate,
    "context_bytes": _bytes,
    "cublas_workspace_bytes": _bytes,
}
