"""Which meshes fit how many ranks, and which models divide so; decided without any rank."""

from __future__ import annotations

import math

import pytest
import torch

from fw.errors import UserError
from fw.kinds.offload import OffloadPolicy
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw_models.gpt2 import GPT2, GPT2Config
from fw_models.layers import RopeScaling
from fw_models.llama import Llama, LlamaConfig
from fw_models.mistral import Mistral, MistralConfig
from fw_models.qwen3_moe import Qwen3MoE, Qwen3MoEConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.optimizer.sgd import SGD, SGDConfig
from fw_plugins.sharding.fsdp import FSDP, FSDPConfig

SPEC = StepSpec(PrecisionPolicy(*[torch.float32] * 3), OffloadPolicy(), SGD(SGDConfig()).spec(torch.device("cpu")))


def test_the_product_of_a_mesh_is_the_world():
    for world in (1, 2, 3, 4, 6, 8, 12):
        for replicate in (1, 2, 3):
            for tensor in (1, 2, 4):
                for context in (1, 2):
                    plugin = FSDP(FSDPConfig(replicate=replicate, tensor=tensor, context=context))
                    if world % (replicate * tensor * context):
                        with pytest.raises(UserError, match=f"does not fit {world} ranks; what does: "):
                            plugin.mesh_shape(world)
                        continue
                    shape = plugin.mesh_shape(world)
                    assert math.prod(shape.values()) == world
                    assert list(shape) == [name for name in ("replicate", "shard", "context", "tensor") if name in shape]


TORN = "fsdp: reshard_after_forward 2 keeps parts of what tensor divides, which torch's FSDP2 does not; use true or false"
ALONE = "sharding.context_method: ring passes keys between ranks of context, which is 1; leave it out, or set context"


@pytest.mark.parametrize(
    ("options", "world", "says"),
    [
        ({"replicate": 3}, 4, "fsdp: replicate 3 does not fit 4 ranks; what does: replicate: 4; replicate: 2, shard: 2; shard: 4"),
        (
            {"shard": 4, "tensor": 2},
            4,
            "fsdp: shard 4 × tensor 2 does not fit 4 ranks; what does: shard: 2, tensor: 2; shard: 4; tensor: 4",
        ),
        ({"shard": 2}, 1, "fsdp: shard 2 does not fit 1 ranks; what does: shard: 1"),
        ({"reshard_after_forward": 3}, 4, "fsdp: reshard_after_forward 3 does not divide shard × context = 4; what does: 1, 2, 4"),
        (
            {"reshard_after_forward": 2, "tensor": 2},
            8,
            "fsdp: reshard_after_forward 2 keeps parts of what tensor divides, which torch's FSDP2 does not; use true or false",
        ),
        (
            {"context_method": "ring"},
            2,
            "sharding.context_method: ring passes keys between ranks of context, which is 1; leave it out, or set context",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(options, world, says):
    with pytest.raises(UserError) as refused:
        FSDP(FSDPConfig(**options)).mesh_shape(world)
    assert str(refused.value) == says


def llama(**shape) -> Llama:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, **shape}
    with torch.device("meta"):
        return Llama(LlamaConfig(**sizes), 50, 64, SDPAttention(None))


def check(model, length: int = 64, **options) -> None:
    plugin = FSDP(FSDPConfig(**options))
    plugin.check(model, plugin.mesh_shape(math.prod(options.values())), SPEC, length)


def test_models_that_divide():
    check(llama(), tensor=4)
    check(llama(num_key_value_heads=1), tensor=4)  # a single key and value head is every rank's
    check(llama(), tensor=2, context=2)
    check(llama(num_key_value_heads=1), context=4)
    with torch.device("meta"):
        check(GPT2(GPT2Config(n_embd=64, n_layer=2, n_head=4), 51, 64, SDPAttention(None)), tensor=2, context=2)


@pytest.mark.parametrize(
    ("model", "length", "options", "says"),
    [
        (llama(num_key_value_heads=2), 64, {"tensor": 4}, "sharding.tensor: 4 does not divide 2 key and value heads; what does: 1, 2"),
        (llama(intermediate_size=97), 64, {"tensor": 2}, "sharding.tensor: 2 does not divide 97 features of the feed-forward network"),
        (llama(), 62, {"tensor": 4}, "sharding.tensor: 4 does not divide 62 positions of a sequence on a rank; what does: 1, 2"),
        (llama(), 60, {"context": 2, "tensor": 4}, "sharding.tensor: 4 does not divide 30 positions of a sequence on a rank"),
        (llama(), 63, {"context": 2}, "train.sequence_length: 63 does not divide over sharding.context: 2"),
        (llama(), 64, {"context": 8}, "sharding.context: 8 ranks exchange heads and do not divide the 4 of each; what does: 1, 2, 4"),
        (llama(), 64, {"tensor": 2, "context": 4}, "sharding.context: 4 ranks exchange heads and do not divide the 2 of each"),
        (
            llama(rope_scaling=RopeScaling(rope_type="dynamic", factor=2.0), max_position_embeddings=64),
            64,
            {"context": 2},
            "because model.rope_scaling of type dynamic depends on the longest position of the batch; use context: 1",
        ),
    ],
)
def test_models_that_do_not_are_refused_with_the_reason(model, length, options, says):
    with pytest.raises(UserError) as refused:
        check(model, length, **options)
    assert says in str(refused.value)


def test_a_ring_is_for_causal_attention_over_chunks_of_chunks():
    check_ring = lambda model, length: FSDP(FSDPConfig(context=4, context_method="ring")).check(  # noqa: E731
        model, {"shard": 1, "context": 4}, SPEC, length
    )
    check_ring(llama(num_attention_heads=2, head_dim=16), 64)  # more ranks than heads
    with pytest.raises(UserError, match=r"60 does not divide over sharding.context: 4, which cuts it into twice as many chunks for a ring"):
        check_ring(llama(), 60)
    with torch.device("meta"):
        windows = Mistral(MistralConfig(64, 2, 4, intermediate_size=96, sliding_window=16), 50, 64, SDPAttention(None))
    with pytest.raises(UserError, match="this model has windows; use heads"):
        check_ring(windows, 64)


def test_experts_of_two_widths_must_both_divide():
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "intermediate_size": 24, "mlp_only_layers": [0]}
    with torch.device("meta"):
        model = Qwen3MoE(Qwen3MoEConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=8, **shape), 50, 64, SDPAttention(None))
    check(model, tensor=4)
    with pytest.raises(UserError, match="8 does not divide 12 features"):
        check(model, tensor=8)
