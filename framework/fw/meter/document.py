"""The memory of a run's ranks as one document, predicted and measured alike: what ``fw plan --json`` and ``fw profile --json`` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fw.meter.detail import Detail
from fw.meter.step_memory import StepMemory
from fw.meter.step_time import StepTime

COMPONENTS = {
    "parameters": "parameters as this rank keeps them",
    "gradients": "gradients of parameters",
    "optimizer": "what the optimizer keeps from step to step, master weights included",
    "activations": "what forward leaves for backward, parameters converted for it included",
    "temporary": "results on their way, gradients of activations, what is recomputed",
    "communication": "parameters gathered from other ranks, and what ranks send and receive",
    "buffers": "what the model keeps besides parameters",
    "inputs": "the step's batches",
    "kv": "keys and values of generation",
    "other": "what was there before the step and is none of these",
}
PHASES = ("load", "forward", "backward", "step", "validate", "save", "resume", "generate")


@dataclass(frozen=True)
class PhaseMemory:
    """What a phase of a run takes, in bytes.

    Attributes:
        parts: :data:`COMPONENTS` at its highest moment.
        host: host memory besides what its process and its tensors have anyway: what is to be written, page-locked buffers.
        disk: that this rank reads from files, or writes.
    """

    parts: Mapping[str, int]
    host: int = 0
    disk: int = 0

    @property
    def allocated_peak(self) -> int:
        """What tensors take."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        """An entry of ``phases``."""
        taken = {"allocated_peak_bytes": self.allocated_peak, "host_bytes": self.host, "disk_bytes": self.disk}
        return {**taken, "components_at_peak": _in_bytes(self.parts)}

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> PhaseMemory:
        """What :meth:`as_json` gave."""
        parts = {name: raw["components_at_peak"][f"{name}_bytes"] for name in COMPONENTS}
        return PhaseMemory(parts, raw["host_bytes"], raw["disk_bytes"])


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory, in bytes.

    Attributes:
        allocated_peak: what tensors take at the peak; the upper end where a range was predicted, the highest of the steps measured.
        allocated_peak_low: the lower end, the lowest; equal where nothing overlaps.
        reserved_peak: what the caching allocator holds for them; the same on the CPU, which has none.
        driver_peak: what the device's driver has given out for the process, its context and workspaces included; 0 on the CPU.
        host_peak: the process's resident memory.
        peak_phase: of :data:`PHASES`.
        at_peak: :data:`COMPONENTS` at the peak, which they add up to.
        most: each component's own maximum over the steps from the second on.
        phases: what each of :data:`PHASES` takes that is known; a profile measures those of a step. All of the above is of steps: ``load``
            and ``resume`` come before them, ``validate`` and ``save`` between two.
    """

    rank: int
    allocated_peak: int
    allocated_peak_low: int
    reserved_peak: int
    driver_peak: int
    host_peak: int
    peak_phase: str
    at_peak: Mapping[str, int]
    most: Mapping[str, int]
    phases: Mapping[str, PhaseMemory] = field(default_factory=dict)

    @property
    def taken(self) -> int:
        """What a budget is compared with: on a device with a driver all that it gave out, else what tensors take; of another phase than a
        step's where that takes more."""
        highest = max((phase.allocated_peak for phase in self.phases.values()), default=0)
        return (self.driver_peak or self.allocated_peak) + max(0, highest - self.allocated_peak)

    def as_json(self) -> dict[str, Any]:
        """An entry of ``per_rank``."""
        return {
            "rank": self.rank,
            "allocated_peak_bytes": self.allocated_peak,
            "allocated_peak_low_bytes": self.allocated_peak_low,
            "reserved_peak_bytes": self.reserved_peak,
            "driver_peak_bytes": self.driver_peak,
            "host_peak_bytes": self.host_peak,
            "peak_phase": self.peak_phase,
            "components_at_peak": _in_bytes(self.at_peak),
            "components_max": _in_bytes(self.most),
            "phases": {name: self.phases[name].as_json() for name in PHASES if name in self.phases},
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> RankMemory:
        """What :meth:`as_json` gave."""
        peaks = {
            name: raw[f"{name}_bytes"] for name in ("allocated_peak", "allocated_peak_low", "reserved_peak", "driver_peak", "host_peak")
        }
        at_peak, most = ({name: raw[key][f"{name}_bytes"] for name in COMPONENTS} for key in ("components_at_peak", "components_max"))
        phases = {name: PhaseMemory.from_json(phase) for name, phase in raw.get("phases", {}).items()}
        return RankMemory(raw["rank"], **peaks, peak_phase=raw["peak_phase"], at_peak=at_peak, most=most, phases=phases)

    @staticmethod
    def of_steps(rank: int, steps: Sequence[StepMemory], host_peak: int) -> RankMemory:
        """Of a rank without a caching allocator, by steps that have come to rest: in a run, those from the second on."""
        highest = max(steps, key=lambda step: step.peak_bytes)
        lowest = min(step.low_bytes for step in steps)
        most = {name: max(step.most.get(name, 0) for step in steps) for name in COMPONENTS}
        phases = {
            name: PhaseMemory(max((step.phases[name] for step in steps if name in step.phases), key=lambda parts: sum(parts.values())))
            for name in dict.fromkeys(name for step in steps for name in step.phases)
        }
        peak = highest.peak_bytes
        return RankMemory(rank, peak, lowest, peak, 0, host_peak, highest.phase, highest.at_peak, most, phases)


@dataclass(frozen=True)
class Generation:
    """What generating is planned for, and what would fit.

    Attributes:
        token_bytes: that keys and values of a token take.
        sequences: at once, each of ``context`` tokens.
        kv_budget: bytes that the budget leaves for keys and values.
        largest_context: tokens of each of so many sequences that fit these, no more than ``context``; ``largest_sequences``, how many of
            ``context`` tokens do.
        brought_bytes: of weights that every step brings to the GPU from elsewhere; ``brought_seconds``, how long that takes at least, as
            the device's data sheet has it, None where they come from files.
    """

    token_bytes: float
    sequences: int
    context: int
    kv_budget: int
    largest_context: int
    largest_sequences: int
    brought_bytes: int = 0
    brought_seconds: float | None = None


@dataclass(frozen=True)
class MemoryDocument:
    """The memory of a run.

    Attributes:
        config: the file's name or path, as it was given.
        device: what ranks compute on.
        budget: bytes a rank may take; None where nothing bounds it.
        step_time: seconds per optimizer step; None where it is not known.
        generation: of a model that generates; None for a training run.
        detail: one step more closely; no part of the JSON.
        time: where the time of a step went, where that was measured; no part of the JSON.
    """

    config: str
    device: str
    world_size: int
    budget: int | None
    per_rank: Sequence[RankMemory]
    step_time: float | None
    generation: Generation | None = None
    detail: Detail | None = None
    time: StepTime | None = None

    @property
    def largest(self) -> RankMemory:
        """The rank that takes most; the first of several."""
        return max(self.per_rank, key=lambda rank: rank.taken)

    @property
    def fits(self) -> bool | None:
        """Whether every rank stays within the budget; None where there is none."""
        return None if self.budget is None else self.largest.taken <= self.budget

    def as_json(self) -> dict[str, Any]:
        """The document; docs/memory.md has its schema."""
        return {
            "config": self.config,
            "device": self.device,
            "world_size": self.world_size,
            "fits": self.fits,
            "budget_bytes": self.budget,
            "per_rank": [rank.as_json() for rank in self.per_rank],
            "step_time_s": self.step_time,
            **({"generation": vars(self.generation)} if self.generation is not None else {}),
        }

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> MemoryDocument:
        """What :meth:`as_json` gave."""
        ranks = [RankMemory.from_json(rank) for rank in raw["per_rank"]]
        generation = Generation(**raw["generation"]) if "generation" in raw else None
        return MemoryDocument(raw["config"], raw["device"], raw["world_size"], raw["budget_bytes"], ranks, raw["step_time_s"], generation)


def _in_bytes(parts: Mapping[str, int]) -> dict[str, int]:
    return {f"{name}_bytes": parts.get(name, 0) for name in COMPONENTS}
