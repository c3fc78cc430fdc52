"""Why pairs of plugins are refused: what another project, a method, or fw itself is like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Whose = Literal["upstream", "method", "fw"]


@dataclass(frozen=True)
class Cause:
    """Of refusals.

    Attributes:
        told: what stands in their sentences.
        whose: of another project; of a method, whoever implements it; or of fw, which could be otherwise.
        why: in a sentence.
        source: where that can be read; None if it is fw's own.
        shown: a file of an installed package, and a piece of it that would be gone were the cause gone.
    """

    told: str
    whose: Whose
    why: str
    source: str | None = None
    shown: tuple[str, str] | None = None


_DEEPSPEED = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/"


def _deepspeed(told: str, why: str, file: str, piece: str) -> Cause:
    return Cause(told, "upstream", why, f"{_DEEPSPEED}{file}", (file, piece))


CAUSES: tuple[Cause, ...] = (
    _deepspeed(
        "joins parameters into one flat tensor",
        "DeepSpeed gives the optimizer one flat tensor per group, a part of it on each rank: rows and matrices have no edges there.",
        "deepspeed/runtime/zero/stage_1_and_2.py",
        "self.flatten_dense_tensors_aligned(",
    ),
    _deepspeed(
        "puts it on nvme in stage 3 only",
        "In stages 1 and 2 DeepSpeed takes every place that is not the device for host memory, without a word.",
        "deepspeed/runtime/zero/stage_1_and_2.py",
        "offload_optimizer_config.device != OffloadDeviceEnum.none",
    ),
    _deepspeed(
        "gathers one dtype",
        "DeepSpeed gathers parameters of stage 3 in buckets of one floating-point dtype.",
        "deepspeed/runtime/zero/partition_parameters.py",
        "all params in a coalesced bucket must have the same communication dtype",
    ),
    _deepspeed(
        "keeps fp32 weights for an optimizer that is offloaded",
        "DeepSpeed steps bf16 weights on the host by its own CPU Adam only.",
        "deepspeed/runtime/base_optimizer.py",
        "bf16 master weights require ZeRO-Offload + DeepSpeedCPUAdam",
    ),
    _deepspeed(
        "engine keeps its weights for forward in one dtype",
        "DeepSpeed casts the module once, when its engine is made.",
        "deepspeed/runtime/engine.py",
        "self._cast_module_mixed_precision(param_dtype",
    ),
    _deepspeed(
        "brings parameters to the layers that DeepSpeed sees",
        "DeepSpeed gathers a layer's parameters in a hook before that layer's own forward, and no other's.",
        "deepspeed/runtime/zero/parameter_offload.py",
        "module.register_forward_pre_hook(_pre_forward_module_hook)",
    ),
    _deepspeed(
        "has no whole rows of a weight when dora takes their norms",
        "DeepSpeed gathers a layer's parameters in a hook before that layer's own forward, and norms are taken outside of it.",
        "deepspeed/runtime/zero/parameter_offload.py",
        "module.register_forward_pre_hook(_pre_forward_module_hook)",
    ),
    _deepspeed(
        "because DeepSpeed places optimizer state itself",
        "DeepSpeed's offload moves optimizer state between host and device, as paging would.",
        "deepspeed/runtime/zero/offload_config.py",
        "Device memory to offload optimizer state",
    ),
    _deepspeed(
        "offload.params: cpu needs sharding.stage=3",
        "DeepSpeed offloads parameters in stage 3 only.",
        "deepspeed/runtime/zero/offload_config.py",
        "Set options for parameter offload. Valid only with stage 3.",
    ),
    Cause(
        "needs sharding that brings parameters block by block",
        "upstream",
        "torch's DDP wants all parameters of a module on its device; FSDP2 has a policy that keeps them on the host.",
        "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html#torch.distributed.fsdp.CPUOffloadPolicy",
        ("torch/nn/parallel/distributed.py", "DistributedDataParallel's input module must be on"),
    ),
    Cause(
        "takes all state there, and paged_",
        "upstream",
        "bitsandbytes pages state that lies on a CUDA device; on the host it falls back to state without pages.",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/optim/optimizer.py",
        ("bitsandbytes/optim/optimizer.py", "Paged optimizers are not supported on CPU"),
    ),
    Cause(
        "codes do not train",
        "upstream",
        "bitsandbytes freezes weights that it quantizes: integers have no gradients.",
        "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/nn/modules.py",
        ("bitsandbytes/nn/modules.py", "quantized weights should be frozen by default"),
    ),
    Cause(
        "its products would be of weights that are not kept",
        "upstream",
        "torchao's float8 layer rounds the linear layer's own weight in every step.",
        "https://github.com/pytorch/ao/blob/v0.18.0/torchao/float8/float8_linear.py",
        ("torchao/float8/float8_linear.py", "new_mod.weight = mod.weight"),
    ),
    Cause(
        "transformers has no equal of ChunkedAttention",
        "upstream",
        "transformers chooses attention by name among its own: eager, sdpa, flash and flex.",
        "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/modeling_utils.py",
        ("transformers/modeling_utils.py", '"sdpa": sdpa_attention_forward'),
    ),
    Cause(
        "and this optimizer needs all of it",
        "method",
        "Muon orthogonalises a whole matrix, LAMB and Adafactor scale a layer's update by norms and means of all of it.",
        "https://arxiv.org/abs/1904.00962",
    ),
    Cause(
        "the norms of rows are of the weights",
        "method",
        "DoRA divides by the norm of weight and change together, in every step; from codes that is the whole weight decoded again.",
        "https://arxiv.org/abs/2402.09353",
    ),
    Cause(
        "it compares two answers to the same",
        "method",
        "DPO's loss is of a pair of answers.",
        "https://arxiv.org/abs/2305.18290",
    ),
    Cause(
        "would learn rejected answers as it does chosen ones",
        "method",
        "A pair of answers tells which is better, which a loss of single texts does not use.",
        "https://arxiv.org/abs/2305.18290",
    ),
    Cause(
        "nothing in it says what an answer is",
        "method",
        "Supervised fine-tuning learns demonstrated answers to prompts, and plain text has neither.",
        "https://arxiv.org/abs/2203.02155",
    ),
    Cause("compares with the model without its adapters", "fw", "A second copy of the model as reference would double what weights take."),
    Cause(
        "virtual tokens stand before a row, which both answers",
        "fw",
        "Both answers of a pair are one row, and the second would not see what stands before the first.",
    ),
    Cause(
        "qat trains the weights that are rounded",
        "method",
        "A frozen base learns nothing of its rounding: beside adapters it may be codes at once.",
        "https://arxiv.org/abs/1308.3432",
    ),
    Cause(
        "products would be of weights rounded twice",
        "method",
        "What is learnt would be of two grids, and the codes that come of it have one.",
        "https://arxiv.org/abs/1308.3432",
    ),
    Cause("auto chooses for rows of one length", "fw", "What a block's results take and cost is measured for one shape."),
    Cause("takes no virtual tokens", "fw", "Models of transformers are given token ids, and not embeddings."),
    Cause("no model plugin reads model_type", "fw", "The engine generates with fw's own models, whose attention reads its caches."),
)


def cause_of(sentence: str) -> Cause | None:
    """Why a pair is refused with this sentence."""
    return next((cause for cause in CAUSES if cause.told in sentence), None)
