"""`fw plan` beside peaks that others have published of their own programs: docs/published.md.

    tools/bench published

Nothing runs on a GPU: each case is planned on this machine, for the GPU that it was measured on.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from fw.meter.document import RankMemory
from fw.planning.plan import plan

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs/published"
TITAN, TUNE, TUNE_LORA = "torchtitan-llama3.1-8b", "torchtune-llama3.2-3b", "torchtune-llama3.1-8b-lora"
H100_96GB = str(Path(__file__).with_name("h100_96gb.yaml"))
CHUNKS = ("objective.chunk_tokens=1024",)
FULL = (*CHUNKS, "activation=full")
FUSED = (*FULL, "optimizer.in_backward=true")
OFFLOADED = (*FUSED, "offload.activations=cpu")

ADAPTERS = "peft={name: lora, rank: 64, alpha: 128, targets: [q_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}"
LORA = (*FULL, "offload.activations=cpu", ADAPTERS)
NF4 = "quantization={name: nf4, skip: ['*lm_head', '*k_proj']}"  # torchtune quantizes what has an adapter
ON_EIGHT = ("model=llama3.1-70b", "peft.rank=16", "sharding=fsdp", "train.global_batch_size=16")
LARGEST = ("model=llama3-405b", "peft.rank=16", "peft.alpha=32", "sharding=fsdp", "train.global_batch_size=16", NF4)

REPORT = "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"

INTRO = """# Published peaks

What `fw plan` says of configurations whose peak others have published, measured with their own programs. fw does the same techniques in
its own way, so that a difference is one of programs as well as of prediction; the plan was fitted to none of them. Made by
`tools/bench published` on {date}, without a GPU.

| case | GPU | figure | published | planned | error |
|---|---|---|---|---|---|
"""
OUTRO = """
Error: (planned - published) ÷ published. torchtitan's figure is what its allocator has reserved at most, torchtune's what tensors take at
most ("active").

- torchtitan: [its report of December 2024]({titan}), rows without `torch.compile`; its sequences have 8,192 tokens. H100s with 96 GB.
- torchtune: [README.md](https://github.com/pytorch/torchtune/blob/main/README.md). All but the first row of its ladder were measured with
  `torch.compile`, which a plan does not know: between those two rows of its table, compiling alone takes 9 GiB off (60.0 to 51.0). The
  8 B case was compiled, too.
- 8-bit AdamW is planned as fw computes it: it takes a parameter at a time to fp32, which for an embedding of 394 M values is more than
  bitsandbytes' kernel does. `paged_adamw_8bit` is bitsandbytes', whose state lies in host memory until it is needed.
- Its LoRA and QLoRA were compiled, too. The layers with adapters, and their ranks, are those of its recipes; adapters are in bf16, and
  what has none (keys, embeddings, head) is not quantized.
- Its 405 B is planned with the batch of its table, which is not that of its recipe; what is between both is not explained.
- Planned peaks are what the GPU's allocator will say, whose blocks are a little larger than their tensors: 0.5 GB in the 13 B below.
- Not planned: cases that do not say how long sequences are.

## Beside estimates

Estimates add up what each component takes. A plan knows when: gradients of a full model are only all there when the activations are gone,
so that recomputation hardly moves the peak of a 13 B, and rows of a sum are never taken at once. In GB (10^9 bytes), each component's
own maximum; the last row is the peak.

{estimates}

The page that prints them ([memory-optimization.md]({page})) measured nothing, and names no length;
planned are rows of 2,048 tokens, one at a time, on an A100 with 80 GB. Its own rows of the 70 B add up to 60, with 5 for CUDA's context;
it prints 75. In the plan the state of the paged optimizer lies in host memory, but for the parameter whose turn it is. The 405 B is there,
too, on four GPUs that are given 70 GB each and 100 GB of the host's memory, and in the page on QLoRA beside it with some 70 GB on each of
eight; figures are of all GPUs together.
"""
PAGE = "https://github.com/Orchestra-Research/AI-Research-SKILLs/blob/HEAD/10-optimization/bitsandbytes/references/memory-optimization.md"


@dataclass(frozen=True)
class Case:
    """A published peak in GiB, and what comes to the same in fw."""

    name: str
    config: str
    device: str
    gpu: str
    published: float
    overrides: tuple[str, ...] = ()
    world_size: int | None = None
    reserved: bool = False

    def planned(self, rank: RankMemory) -> float:
        """The figure that was published, in GiB."""
        return (rank.reserved_peak if self.reserved else rank.allocated_peak) / 2**30


CASES = [
    Case("torchtitan, 8 B, FSDP on 8, selective", TITAN, H100_96GB, "8 × H100", 82.4, reserved=True),
    Case("the same on 128", TITAN, H100_96GB, "128 × H100", 67.0, ("train.global_batch_size=256",), 128, reserved=True),
    Case("torchtune, 8 B, one GPU", "torchtune-llama3.1-8b", "rtx4090", "RTX 4090", 18.9),
    Case("torchtune, 3 B, packed rows", TUNE, "a100-80gb", "A100", 60.0),
    Case("+ loss in chunks (and compiled)", TUNE, "a100-80gb", "A100", 42.9, CHUNKS),
    Case("+ recomputation", TUNE, "a100-80gb", "A100", 24.9, FULL),
    Case("+ update in backward", TUNE, "a100-80gb", "A100", 23.1, FUSED),
    Case("+ activations on the host", TUNE, "a100-80gb", "A100", 21.8, OFFLOADED),
    Case("+ 8-bit AdamW", TUNE, "a100-80gb", "A100", 17.6, (*OFFLOADED, "optimizer.name=adamw_8bit")),
    Case("recomputed, activations on the host, LoRA", TUNE, "a100-80gb", "A100", 8.5, LORA),
    Case("the same, QLoRA", TUNE, "a100-80gb", "A100", 4.6, (*LORA, NF4)),
    Case("torchtune, 8 B, LoRA", TUNE_LORA, "rtx4090", "RTX 4090", 16.2),
    Case("torchtune, 8 B, QLoRA", TUNE_LORA, "rtx4090", "RTX 4090", 7.4, (NF4,)),
    Case("torchtune, 70 B, LoRA, FSDP on 8", TUNE_LORA, "a100-80gb", "8 × A100", 27.6, ON_EIGHT, 8),
    Case("torchtune, 405 B, QLoRA, FSDP on 8", TUNE_LORA, "a100-80gb", "8 × A100", 44.8, LARGEST, 8),
]


@dataclass(frozen=True)
class Estimate:
    """An estimate by components, in GB as it is printed, of a configuration that names no length of rows."""

    name: str
    config: str
    overrides: tuple[str, ...]
    rows: Mapping[str, tuple[float, tuple[str, ...]]]
    total: float
    world_size: int = 1
    """Ranks; figures are of all of them together."""


_405B = (
    "torchtune-llama3.1-8b-lora",
    (
        *("model=llama3-405b", "peft={name: lora, rank: 32, targets: [all-linear]}", "quantization=nf4", "sharding=fsdp"),
        *("optimizer=paged_adamw_8bit", "train.micro_batch_size=1"),
    ),
)
_STATE = {"weights": (26, ("parameters",)), "gradients": (26, ("gradients",)), "optimizer": (52, ("optimizer",))}
ESTIMATES = [
    Estimate("Llama-2-13B, all of it in 16 bits", "llama2-13b", (), {**_STATE, "activations": (12, ("activations",))}, 116),
    Estimate("the same, recomputed", "llama2-13b", ("activation=full",), {**_STATE, "activations": (3, ("activations",))}, 107),
    Estimate(
        "Llama-2-70B, QLoRA on one GPU of 80 GB",
        "llama2-70b-qlora",
        (),
        {
            "weights and adapters": (35.5, ("parameters",)),
            "activations": (8, ("activations",)),
            "gradients": (0.5, ("gradients",)),
            "optimizer": (1, ("optimizer",)),
            "batch buffer": (10, ("temporary", "inputs", "other")),
        },
        75,
    ),
    Estimate("Llama 3.1 405B in 4 bits, on four of 80 GB and the host", *_405B, {"weights": (200, ("parameters",))}, 4 * 70 + 100, 4),
    Estimate("the same, QLoRA on eight", *_405B, {"weights": (8 * 70, ("parameters",))}, 8 * 70, 8),
]
_GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/published.md")
    options = parser.parse_args()
    rows = []
    for case in tqdm(CASES, disable=None):
        file = CONFIGS / f"{case.config}.yaml"
        rank = plan(file, *case.overrides, world_size=case.world_size, device=case.device).largest
        found = case.planned(rank)
        error = (found - case.published) / case.published
        figure = "reserved" if case.reserved else "allocated"
        rows.append(f"| {case.name} | {case.gpu} | {figure} | {case.published} GiB | {found:.1f} GiB | {error:+.1%} |")
    estimates = "\n".join(_estimates())
    text = INTRO.format(date=datetime.date.today().isoformat()) + "\n".join(rows) + "\n"
    text += OUTRO.format(titan=REPORT, page=PAGE, estimates=estimates)
    options.out.write_text(text)
    print("\n".join(rows))
    print(estimates)


def _estimates() -> list[str]:
    lines = ["| case | component | estimated | planned |", "|---|---|---|---|"]
    for each in tqdm(ESTIMATES, disable=None):
        overrides = (*each.overrides, f"train.global_batch_size={each.world_size}") if each.world_size > 1 else each.overrides
        ranks = plan(CONFIGS / f"{each.config}.yaml", *overrides, world_size=each.world_size, device="a100-80gb").per_rank
        name = each.name
        for component, (printed, parts) in each.rows.items():
            lines.append(
                f"| {name} | {component} | {printed:g} | {sum(rank.most.get(part, 0) for rank in ranks for part in parts) / _GB:.3g} |"
            )
            name = ""
        lines.append(f"| | all | {each.total:g} | {sum(rank.allocated_peak for rank in ranks) / _GB:.3g} |")
    return lines


if __name__ == "__main__":
    main()
