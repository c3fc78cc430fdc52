"""The sections that belong to no plugin: ``train``, ``loader``, ``launch`` and ``memory``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from fw.config.size import parse_size
from fw.errors import UserError, did_you_mean


def _at_least(section: str, values: dict[str, float], minimum: float) -> None:
    for name, value in values.items():
        if value < minimum:
            raise UserError(f"{section}.{name}: {value} is too small; the least is {minimum}")


@dataclass
class TrainSection:
    """How long and in what portions the model is trained."""

    max_steps: int = 1000
    """Optimizer steps in all; a resumed run counts those before it. No effect on memory."""
    global_batch_size: int = 8
    """Sequences per optimizer step over all ranks and accumulated micro-batches; samples, or rows where they are packed. No effect on
    memory: the micro-batch bounds it."""
    micro_batch_size: int | None = None
    """Sequences per forward and backward on one rank; what remains of the global batch is accumulated. Activation memory grows in
    proportion. Empty for a rank's whole share at once."""
    max_tokens_per_batch: int | None = None
    """Instead of micro_batch_size: a micro-batch holds as many sequences as come to so many tokens, padding included (sequences × the
    longest of them). Activation memory grows in proportion, and does not depend on how long samples are."""
    sequence_length: int = 512
    """Tokens per sequence; where the data's samples vary in length, the most. Activation memory grows in proportion (and with its square
    where attention is `eager`)."""
    packing: bool = False
    """Put samples of varying length together into rows of sequence_length, where each sees itself only; none is cut. Hardly any padding
    is left, and all rows have one length. Off: micro-batches are padded to their longest sample."""
    length_bucketing: int = 0
    """Steps within which samples of varying length change places, so that those of similar length are in the same step: less padding.
    0 for none. No effect on memory."""
    gradient_clip_norm: float = 1.0
    """Largest global L2 norm of the gradient over all ranks; 0 switches clipping off. No effect on memory."""
    on_nonfinite: Literal["stop", "skip", "roll_back"] = "stop"
    """What follows a step whose loss or gradient is not finite; weights are never updated by it. `stop` ends the run, `skip` goes on with
    the next step, `roll_back` goes on from weights and optimizer state of the newest checkpoint. No effect on memory."""
    nonfinite_limit: int = 5
    """So many such steps one after another end the run whatever follows one."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and dropout. Weights and order do not depend on the number of ranks."""
    deterministic: bool = False
    """Two runs on equal machines give equal bits, or the run ends with the operator that prevents it. Some operators on GPUs are slower so,
    and take temporary memory that a plan does not know."""
    ema_decay: float = 0.0
    """Beside the weights keep their exponential moving average, of which each step leaves this part, 0.999 for one; validation and sample
    see the average, a checkpoint holds both. 4 bytes per trained parameter, and a read and a write of them per step. 0 for none."""
    compile: bool = False
    """Compile each block with torch.compile: slower start, usually faster steps and fewer temporary bytes."""
    log_every: int = 1
    """Steps between two rows of metrics; each costs one synchronisation with the device."""
    val_every: int = 100
    """Steps between two passes over the validation split, and one at the end; 0 switches validation off."""
    save_every: int = 500
    """Steps between two checkpoints, and one at the end or on Ctrl-C and SIGTERM; 0 writes none at all."""
    run_dir: str = ""
    """Directory of the run, used as given; empty for `runs/<config name>` under the current directory."""
    sample_prompt: str = ""
    """Text that the sample at the end continues; empty for a prompt taken from the validation split."""
    sample_tokens: int = 128
    """Tokens of sample text generated at the end; 0 for none."""

    def __post_init__(self) -> None:
        _at_least(
            "train",
            {k: getattr(self, k) for k in ("max_steps", "global_batch_size", "sequence_length", "log_every", "nonfinite_limit")},
            1,
        )
        if self.micro_batch_size is not None:
            _at_least("train", {"micro_batch_size": self.micro_batch_size}, 1)
        if self.max_tokens_per_batch is not None and self.max_tokens_per_batch < self.sequence_length:
            raise UserError(
                f"train.max_tokens_per_batch: {self.max_tokens_per_batch} does not hold one sequence of train.sequence_length"
                f" {self.sequence_length}; the least that works is {self.sequence_length}"
            )
        if self.max_tokens_per_batch is not None and self.micro_batch_size is not None:
            raise UserError(
                f"train.max_tokens_per_batch: {self.max_tokens_per_batch} given together with train.micro_batch_size"
                f" {self.micro_batch_size}, and both say how much a micro-batch holds; leave out one of them (null)"
            )
        if self.packing and self.length_bucketing:
            raise UserError(
                f"train.length_bucketing: {self.length_bucketing} given together with train.packing, which makes all rows equally long;"
                " leave out one of them"
            )
        if not 0 <= self.ema_decay < 1:
            raise UserError(f"train.ema_decay: {self.ema_decay} is not from 0 to below 1; 0.999 is usual, and 0 for none")
        _at_least(
            "train",
            {k: getattr(self, k) for k in ("gradient_clip_norm", "val_every", "save_every", "seed", "sample_tokens", "length_bucketing")},
            0,
        )


@dataclass
class LoaderSection:
    """How batches come to the device."""

    workers: int = 0
    """Processes of each rank that read batches ahead; 0 reads between steps, which is enough where tokens are ready on a disk. Each takes
    host memory of its own."""
    prefetch: int = 2
    """Batches that each worker has ready."""
    pin_memory: bool | None = None
    """Copy batches to page-locked memory, from which GPUs take them while they compute; empty for doing so where there is a GPU."""
    persistent: bool = True
    """Keep workers between validations instead of starting them again."""

    def __post_init__(self) -> None:
        _at_least("loader", {"workers": self.workers}, 0)
        _at_least("loader", {"prefetch": self.prefetch}, 1)


@dataclass
class LaunchSection:
    """Where the ranks run. Under torchrun or srun the processes exist already and their number is taken from there."""

    devices: int = 1
    """Ranks on each host: one per GPU, or processes on the CPU."""
    nodes: int = 1
    """Hosts. With more than one, start the same command on each of them."""
    rendezvous: str = ""
    """`HOST` or `HOST:PORT` on which the hosts find each other, an address of one of them; needed with more than one host."""
    port: int = 0
    """TCP port of the rendezvous where `rendezvous` names none, and of rank 0 under srun. 0: 29500 with several hosts, a free one on a
    single host, one derived from the job's number under srun."""
    interface: str = ""
    """Network interface of the ranks' traffic, like `eth0` (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME). Empty on a single host for the
    libraries' own choice, with several for the one from which the rendezvous host is reached."""
    join_timeout: int = 900
    """Seconds for which a host waits for the others to join, at the start and after a failure."""
    max_restarts: int = 0
    """Failures after which fw starts its ranks again, from the newest checkpoint of the run (under torchrun: its own option). Wrong
    input and stops are never restarted. No effect on memory."""
    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where it is available."""
    threads: int | None = None
    """CPU threads of a rank; empty for OMP_NUM_THREADS, else the cores that fw may use, by affinity and the container's quota, ÷ ranks that
    fw starts on the host; ranks that others start (torchrun, srun) have as many as torch takes."""
    timeout: int = 1800
    """Seconds after which a collective that does not complete fails the run. A rank that finishes no step for a quarter longer writes
    its stack and ends; choose more than a step takes."""
    nccl_async_errors: bool = True
    """End a rank whose collective on GPUs failed or timed out (TORCH_NCCL_ASYNC_ERROR_HANDLING); without it the rank waits forever."""
    nccl_heartbeat: int = 480
    """Seconds after which NCCL's own watchdog, should it hang itself, ends the rank (TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC)."""

    def __post_init__(self) -> None:
        _at_least("launch", {k: getattr(self, k) for k in ("devices", "nodes", "timeout", "join_timeout", "nccl_heartbeat")}, 1)
        _at_least("launch", {"max_restarts": self.max_restarts, "port": self.port}, 0)
        if self.threads is not None:
            _at_least("launch", {"threads": self.threads}, 1)
        if self.rendezvous and not re.fullmatch(r"(\[[^\s\]]+\]|[^\s:\[\]]+)(:\d+)?", self.rendezvous):
            raise UserError(f"launch.rendezvous: '{self.rendezvous}' is not of the form HOST:PORT or HOST ([ADDRESS]:PORT with IPv6)")
        if max(self.port, self.rendezvous_port) > 65535:
            raise UserError(f"launch.port: {max(self.port, self.rendezvous_port)} is no TCP port; the largest is 65535")

    @property
    def rendezvous_host(self) -> str:
        """The host of :attr:`rendezvous`, or this one."""
        return re.sub(r":\d+$", "", self.rendezvous).strip("[]") or "localhost"

    @property
    def rendezvous_port(self) -> int:
        """The port of :attr:`rendezvous`, else :attr:`port`, else what its docstring says."""
        named = re.search(r":(\d+)$", self.rendezvous)
        return int(named[1]) if named else self.port or (29500 if self.nodes > 1 else 0)


TECHNIQUES = ("micro_batch", "chunked_loss", "activation", "precision", "optimizer", "sharding", "offload")
"""Ways to take less memory, those first that cost least."""

ASKED_FOR = ("peft", "quantization")
"""Those that change what is learnt: only where somebody asks for them, and then only where nothing fits without."""


@dataclass
class MemorySection:
    """What the run may take."""

    budget: str = ""
    """Memory per rank, like `24GiB`; on the CPU, of tensors. Before the run starts, `techniques` are searched for the fastest run that is
    predicted to stay within it, and a step is measured beside the prediction; empty for none."""
    techniques: list[str] = field(default_factory=lambda: list(TECHNIQUES))
    """What may be changed for the budget, of what the config leaves open: micro_batch (at the same global batch), chunked_loss, activation,
    precision, optimizer (its state in 8 bits), sharding, offload. By name only, and only used where nothing fits without: peft (LoRA
    instead of training all weights), quantization (its base in 4 bits). An empty list: nothing, the budget is only compared. No effect on
    memory without a budget."""
    measure_step: int = 0
    """Step, counted from 1, whose peak is measured by what it is for (weights, gradients, optimizer state, activations …), by the
    allocator's own events; 0 for none. That step is slower and counts in no rate. No effect on memory worth the name."""
    measure_steps: int = 1
    """Steps that are measured, from measure_step on."""
    trace_step: int = 0
    """Step, counted from 1, that is traced operator by operator, into `trace/` of the run's directory: `rankN.pt.trace.json.gz` for
    Perfetto and TensorBoard, on a GPU `rankN.memory.pickle` for PyTorch's memory viewer; 0 for none. That step is slower and counts in no
    rate. No effect on memory worth the name."""
    release: bool = False
    """Between training, validation and saving: collect garbage, and give the caching allocator's free blocks back to the GPU, freed pages
    to the kernel. The next phase takes its bytes anew, which costs time; the summary says how many bytes and seconds. Off, only freed
    pages of the CPU go back, after a validation."""

    def __post_init__(self) -> None:
        if self.budget and parse_size(self.budget) <= 0:
            raise UserError(f"memory.budget: {self.budget} is too small; leave it empty for none")
        for name in self.techniques:
            if name not in (known := (*TECHNIQUES, *ASKED_FOR)):
                raise UserError(f"memory.techniques: '{name}' is none{did_you_mean(name, known)} (there are {', '.join(known)})")
        _at_least("memory", {"measure_step": self.measure_step, "trace_step": self.trace_step}, 0)
        _at_least("memory", {"measure_steps": self.measure_steps}, 1)

    def measures(self, step: int) -> bool:
        """Whether the memory of this step, counted from 1, is measured."""
        return bool(self.measure_step) and 0 <= step - self.measure_step < self.measure_steps

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes, or None where there is none."""
        return parse_size(self.budget) if self.budget else None
