"""The options of ZeRO, named as DeepSpeed names them, so that a known DeepSpeed JSON can be carried over."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fw.api import UserError

STAGES = {
    "use_multi_rank_bucket_allreduce": (1, 2),
    "allgather_bucket_size": (1, 2),
    "round_robin_gradients": (1, 2),
    "parameter_alignment": (1, 2),
    "ignore_unused_parameters": (2,),
}
"""Options that mean something in these stages only; those of :data:`STAGE3` in the third only, all others in every one."""
STAGE3 = frozenset(
    {
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential",
        "zero_hpz_partition_size",
        "zero_quantized_weights",
        "zero_quantized_gradients",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
    }
)
PARAM_BUFFERS = {"param_buffer_count": "buffer_count", "param_buffer_size": "buffer_size", "param_max_in_cpu": "max_in_cpu"}
OPTIMIZER_BUFFERS = {
    "optimizer_buffer_count": "buffer_count",
    "optimizer_pipeline_read": "pipeline_read",
    "optimizer_pipeline_write": "pipeline_write",
    "optimizer_fast_init": "fast_init",
}
AIO = {f"aio_{name}": name for name in ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events")}
"""Options of what is on a disk, and their names in the JSON's section."""
ZERO_PLUS_PLUS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")
LEAST_ZERO = frozenset(
    {
        "allgather_bucket_size",
        "sub_group_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold",
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold",
        "param_max_in_cpu",
    }
)


@dataclass
class ZeroConfig:
    """How far ranks divide the training state, and DeepSpeed's buffers on the way. Sizes are elements, not bytes. What is left empty is
    not written to the JSON, so that DeepSpeed's own default holds."""

    stage: int = 2
    """1 divides optimizer state (and the fp32 weights of bf16 and fp16 runs) over ranks; 2 gradients too; 3 parameters too, which are
    gathered module by module. Bytes that a rank of N keeps per parameter from step to step, AdamW in bf16: 6 + 12/N, 2 + 12/N, 18/N."""
    contiguous_gradients: bool | None = None
    """Copy gradients into one buffer of reduce_bucket_size elements as they come (default): no fragmentation, for that buffer's bytes."""
    reduce_scatter: bool | None = None
    """Each rank receives only its part of a gradient's sum (default), instead of all of it."""
    reduce_bucket_size: int | None = None
    """Elements of gradient reduced at a time, in the dtype of reduction: the bucket's bytes, twice with overlap_comm. Empty for DeepSpeed's
    5e8, or for the whole model where that is less."""
    overlap_comm: bool | None = None
    """Reduce gradients while backward goes on, with a second bucket. Empty for DeepSpeed's: on in stage 3, off else."""
    use_multi_rank_bucket_allreduce: bool | None = None
    """Stages 1, 2: one reduction for the parts of several ranks (default). No effect on memory."""
    allgather_bucket_size: int | None = None
    """Stages 1, 2: elements of updated parameters gathered at a time (default 5e8), in the compute dtype."""
    round_robin_gradients: bool | None = None
    """Stages 1, 2: deal parameters out to ranks in turn, so that ranks copy offloaded gradients in parallel. No effect on memory."""
    parameter_alignment: bool | None = None
    """Stages 1, 2: begin each parameter at 16 bytes, for up to 12 bytes of padding each."""
    ignore_unused_parameters: bool | None = None
    """Stage 2: go on where a parameter got no gradient (default), instead of failing. No effect on memory."""
    sub_group_size: int | None = None
    """Stage 3: elements stepped at a time (default 1e9); with the optimizer on a disk, this much of its state is in host memory."""
    stage3_prefetch_bucket_size: int | None = None
    """Stage 3: elements gathered ahead of their use (default 5e7; none with parameters on nvme), in the compute dtype; 0 for none."""
    stage3_param_persistence_threshold: int | None = None
    """Stage 3: parameters of at most this many elements stay whole on every rank (default 1e5). 0 divides all: memory falls as 1/N."""
    stage3_model_persistence_threshold: int | None = None
    """Stage 3: elements in all that may stay whole so (default: no limit)."""
    stage3_max_live_parameters: int | None = None
    """Stage 3: elements that may be gathered at once before the first are given back (default 1e9; 0 with parameters on nvme), in the
    compute dtype."""
    stage3_max_reuse_distance: int | None = None
    """Stage 3: keep a gathered parameter that is used again within this many elements (default 1e9; 0 with parameters on nvme). 0 gives
    each back after use."""
    stage3_module_granularity_threshold: int | None = None
    """Stage 3: gather modules with fewer parameters per submodule than this as one (default 0: none): more live parameters at a time."""
    stage3_use_all_reduce_for_fetch_params: bool | None = None
    """Stage 3: gather by all-reduce (default off): no copies on the host, a zeroed buffer of the gathered size."""
    stage3_allgather_sequential: bool | None = None
    """Stage 3: gather parameters one after another (default off): no flattened copy of the gathered ones."""
    zero_hpz_partition_size: int | None = None
    """Stage 3, GPUs: ranks of a host that keep a second division of the parameters among them (ZeRO++), for 1/size of the parameters in
    the compute dtype more on each; backward then gathers inside the host."""
    zero_quantized_weights: bool | None = None
    """Stage 3, GPUs: gather parameters in 8 bits (ZeRO++): a quarter to half the traffic, and rounding."""
    zero_quantized_gradients: bool | None = None
    """Stage 3, GPUs: reduce gradients in 4 bits (ZeRO++): less traffic, and rounding."""
    log_trace_cache_warnings: bool | None = None
    """Stage 3: say when modules ran in another order than before (default off). No effect on memory."""
    enable_sanity_checks: bool | None = None
    """Stage 3: compare between ranks what they reduce and gather (default off): slower. No effect on memory."""
    param_buffer_count: int | None = None
    """Parameters on a disk: buffers in host memory (default 5), one for each parameter that is in use or gathered ahead."""
    param_buffer_size: int | None = None
    """Parameters on a disk: elements of such a buffer, in the compute dtype; empty for what a rank keeps of the largest parameter, the
    least that works."""
    param_max_in_cpu: int | None = None
    """Parameters on a disk: elements that stay in host memory all the same (default 1e9), in the compute dtype; 0 for none."""
    optimizer_buffer_count: int | None = None
    """Optimizer on a disk: buffers of sub_group_size elements in host memory (default 4, the least for AdamW: weights, gradients and two
    moments)."""
    optimizer_pipeline_read: bool | None = None
    """Optimizer on a disk: read the next group while one is stepped (default off), with a second set of buffers."""
    optimizer_pipeline_write: bool | None = None
    """Optimizer on a disk: write a group while the next is stepped (default off), with a second set of buffers."""
    optimizer_fast_init: bool | None = None
    """Optimizer on a disk: write its first state in larger pieces (default off). No effect on memory."""
    aio_block_size: int | None = None
    """Disk: bytes of one request (default 1 MiB)."""
    aio_queue_depth: int | None = None
    """Disk: requests under way at once, for each thread (default 8)."""
    aio_intra_op_parallelism: int | None = None
    """Disk: threads for one tensor (default 1)."""
    aio_single_submit: bool | None = None
    """Disk: submit requests one by one (default off). No effect on memory."""
    aio_overlap_events: bool | None = None
    """Disk: submit while others complete (default on). No effect on memory."""

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise UserError(f"sharding.stage: {self.stage} is none of 1, 2 and 3")
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name == "stage":
                continue
            stages = (3,) if field.name in STAGE3 else STAGES.get(field.name, (1, 2, 3))
            if self.stage not in stages:
                which = f"stage{'s' * (len(stages) > 1)} {' and '.join(map(str, stages))}"
                raise UserError(f"sharding.{field.name}: means nothing in stage {self.stage}, only in {which}; leave it out")
            least = 0 if field.name in LEAST_ZERO else 1
            if not isinstance(value, bool) and value < least:
                raise UserError(f"sharding.{field.name}: {value} is too small; the least is {least}")

    def given(self, names: dict[str, str]) -> dict[str, int | bool]:
        """Values of the options ``names`` that are not left empty, under the names they are mapped to."""
        return {key: getattr(self, name) for name, key in names.items() if getattr(self, name) is not None}
