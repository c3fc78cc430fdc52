"""Recomputation: the same numbers as without, the operations theory counts, and the bytes it is for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from fw.checkpointing.placement import initialise
from fw.errors import RunError, UserError
from fw.kinds import make
from fw.kinds.activation import ActivationPlugin
from fw.kinds.model import CausalLM
from fw.kinds.offload import OffloadPolicy
from fw.kinds.optimizer import OptimizerSpec
from fw.kinds.precision import PrecisionPolicy
from fw.kinds.sharding import StepSpec
from fw.meter.allocations import allocations
from fw_models.gemma2 import Gemma2, Gemma2Config
from fw_models.gpt2 import GPT2, GPT2Config
from fw_models.llama import Llama, LlamaConfig
from fw_models.mixtral import Mixtral, MixtralConfig
from fw_plugins.activation.blocks import segments
from fw_plugins.activation.keeping import keeping
from fw_plugins.activation.recompute import recompute
from fw_plugins.attention.chunked import ChunkedAttention, ChunkedConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.offload.activations import offload
from fw_plugins.offload.disk_store import DiskStore
from fw_plugins.offload.prefetch import Stored

CPU = torch.device("cpu")
FP32 = PrecisionPolicy(torch.float32, torch.float32, torch.float32)
SPEC = StepSpec(FP32, OffloadPolicy(), OptimizerSpec(torch.optim.SGD, 0.1), micro_batch_size=2)
LENGTH = 32
PLUGINS: dict[str, dict[str, Any]] = {
    "full": {},
    "every_n": {"n": 2},
    "ratio": {"ratio": 0.7},
    "sqrt": {},
    "modules": {"patterns": ["*.mlp", "*.1.*norm*"]},
    "selective": {},
}
SHAPE = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MODELS: dict[str, Callable[[], CausalLM]] = {
    "llama": lambda: Llama(LlamaConfig(**SHAPE), 50, LENGTH, SDPAttention(None)),
    "dropout": lambda: Llama(LlamaConfig(**SHAPE, attention_dropout=0.2), 50, LENGTH, SDPAttention(None)),
    "deep": lambda: Llama(
        LlamaConfig(hidden_size=64, num_hidden_layers=24, num_attention_heads=4, intermediate_size=176), 50, 64, SDPAttention(None)
    ),
    "gemma2": lambda: Gemma2(Gemma2Config(**SHAPE, sliding_window=8), 50, LENGTH, SDPAttention(None)),
    "chunked": lambda: Gemma2(
        Gemma2Config(**SHAPE, sliding_window=12, attn_logit_softcapping=5.0), 50, LENGTH, ChunkedAttention(ChunkedConfig(8))
    ),
    "mixtral": lambda: Mixtral(MixtralConfig(**SHAPE, num_local_experts=4), 50, LENGTH, SDPAttention(None)),
    "gpt2": lambda: GPT2(GPT2Config(n_embd=32, n_layer=5, n_head=4, resid_pdrop=0.2, n_positions=LENGTH), 50, LENGTH, SDPAttention(None)),
}


def plugin(name: str, **options: Any) -> ActivationPlugin:
    return make(ActivationPlugin, name, **options)


def build(architecture: str, name: str = "none", **options: Any) -> CausalLM:
    with torch.device("meta"):
        model = MODELS[architecture]()
    made = plugin(name, **options)
    made.check(model, {}, SPEC, LENGTH)
    made.apply(model, SPEC, LENGTH)
    model.materialise(CPU)
    for parameter, tensor in model.named_parameters():
        initialise(tensor.data, parameter, model.init(parameter), 0)
    return model.train()


def batch() -> Tensor:
    return torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % 50


def forward(model: CausalLM) -> Tensor:
    torch.manual_seed(1)
    return model(batch(), readout=lambda x, head, extra: head(x).float().logsumexp(-1).sum() + (0 if extra is None else extra))


def gradients(model: CausalLM) -> dict[str, Tensor]:
    loss = forward(model)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@cache
def plain(architecture: str) -> dict[str, Tensor]:
    return gradients(build(architecture))


@pytest.mark.parametrize("architecture", [name for name in MODELS if name != "deep"])
@pytest.mark.parametrize("name", PLUGINS)
def test_loss_and_gradients_are_the_same_bits(name, architecture):
    patterns = {"patterns": ["*.mlp", "*.1.ln*"]} if architecture == "gpt2" and name == "modules" else PLUGINS[name]
    model = build(architecture, name, **patterns)
    expected = plain(architecture)
    for _ in range(2):  # nothing is left over from the first time
        found = gradients(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        model.zero_grad()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in MODELS[architecture]().named_parameters()]
    with torch.no_grad():
        assert torch.equal(forward(model.eval()), forward(build(architecture).eval()))


# torch counts the kernels of GPUs; by the same functions of its own, the CPU's.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *args, out_shape=None, **kwargs: sdpa_backward_flop_count(grad, q, k, v)
    ),
}


def flops(model: CausalLM) -> int:
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        forward(model).backward()
    return counter.get_total_flops()


def test_operations_are_those_of_theory():
    """Per token and block, in multiply-adds: q 32·32, k and v 32·16 each, o 32·32, three products of the feed-forward network 32·48.

    Attention: torch counts 2 · heads · head_dim · L of forward for each of two products, and 2.5 times that for its fused backward.
    Backward needs neither a block's last product nor, after it, anything else: repeating ends before.
    """
    tokens, layers = 2 * LENGTH, 5
    q = o = 2 * 32 * 32 * tokens
    k = v = 2 * 32 * 16 * tokens
    up = gate = down = 2 * 32 * 48 * tokens
    attention = 2 * 2 * 32 * LENGTH * tokens
    head = 2 * 32 * 50 * tokens
    block = q + k + v + o + attention + up + gate + down
    straight = layers * (3 * (block - attention) + 3.5 * attention) + 3 * head
    assert flops(build("llama")) == straight
    again = block - down
    assert flops(build("llama", "full")) == straight + layers * again
    assert flops(build("llama", "every_n", n=2)) == straight + 2 * again
    assert flops(build("llama", "ratio", ratio=0.6)) == straight + 3 * again
    # A segment repeats all of its blocks but the last product of the last: 5 blocks are 2 segments.
    assert len(segments(5)) == 2 and flops(build("llama", "sqrt")) == straight + layers * block - 2 * down
    assert flops(build("llama", "modules", patterns=["*.mlp"])) == straight + layers * (up + gate)
    # Products in order: q k v o gate up down; every second one stays, and attention.
    assert flops(build("llama", "selective")) == straight + layers * (q + v + gate)
    assert flops(build("llama", "selective", matmul_every=1)) == straight
    assert flops(build("llama", "selective", save=["attention"])) == straight + layers * (again - attention)


def kept_bytes(name: str, **options: Any) -> tuple[int, int]:
    """What stays between forward and backward, and the peak, beyond the parameters and their gradients."""
    made = build("deep", name, **options)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    ids = torch.arange(4 * 64).view(4, 64) % 50
    with allocations(CPU) as found:
        loss = made(ids, readout=lambda x, head, extra: x.square().sum())
        found.mark("forward")
        loss.backward()
    return found.marks["forward"], found.peak_bytes


def test_memory_falls_in_the_order_of_theory():
    none, none_peak = kept_bytes("none")
    full, full_peak = kept_bytes("full")
    selective, selective_peak = kept_bytes("selective")
    half, _ = kept_bytes("every_n", n=2)
    root, root_peak = kept_bytes("sqrt")
    inputs = 4 * 64 * 64 * 4  # bytes of [B, L, D]
    each = inputs + torch.get_rng_state().nbytes
    assert full - root == (24 - 5) * each, "24 blocks keep 24 inputs and random states, 5 segments 5"
    assert full < 0.2 * none and full_peak < 0.4 * none_peak
    assert abs(half - (none + full) / 2) < 0.02 * none
    assert full_peak < root_peak < selective_peak < none_peak
    assert full < selective < half


def offloaded(model: CausalLM, directory: Path, ahead: int) -> list[Tensor]:
    """Have a model's blocks put what they save on a disk; what they put there is noted."""
    stored: list[Tensor] = []

    class Noting(DiskStore):
        def __call__(self, tensor: Tensor) -> Stored:
            stored.append(tensor)
            return super().__call__(tensor)

    offload(model.blocks, Noting(directory), 1024, ahead)
    return stored


def test_what_offload_sees_of_a_recomputed_block_is_its_input(tmp_path):
    for name, blocks in (("full", 5), ("sqrt", 2)):
        model = build("llama", name)
        stored = offloaded(model, tmp_path, 1)
        found = gradients(model)
        assert all(torch.equal(found[key], value) for key, value in plain("llama").items()), name
        assert [tuple(tensor.shape) for tensor in stored] == [(2, LENGTH, 32)] * blocks, name


@pytest.mark.parametrize("architecture", ["dropout", "chunked", "mixtral"])
@pytest.mark.parametrize("name", ["none", *PLUGINS])
def test_offloaded_blocks_recompute_the_same_bits(tmp_path, name, architecture):
    model = build(architecture, name, **PLUGINS.get(name, {}))
    stored = offloaded(model, tmp_path, 1)
    for _ in range(2):
        found = gradients(model)
        assert all(torch.equal(found[key], value) for key, value in plain(architecture).items())
        model.zero_grad()
    assert stored


def test_a_segment_broken_off_between_its_blocks_leaves_nothing_on_the_stack():
    model = build("llama", "sqrt")
    rope = model.config.rope(0).angles(torch.arange(LENGTH)[None])
    first, second, *_ = model.blocks
    first(torch.ones(1, LENGTH, 32), rope, None)
    with pytest.raises(RunError, match="does more between its blocks"):
        second(torch.ones(1, LENGTH, 32), rope, None)
    first(torch.ones(1, LENGTH, 32), rope, None)
    found = gradients(model)
    assert all(torch.equal(found[key], value) for key, value in plain("llama").items())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_compiled_blocks_recompute_too():
    for name in ("full", "sqrt", "selective"):
        torch.compiler.reset()
        model = build("llama", name)
        for block in model.blocks:
            block.compile(backend="aot_eager")
        found = gradients(model)
        for key, value in plain("llama").items():
            torch.testing.assert_close(found[key], value, msg=lambda text, key=key, name=name: f"{name} {key}: {text}")


def test_segments_are_as_equal_as_can_be():
    assert [len(s) for s in segments(24)] == [4, 5, 5, 5, 5]
    assert [len(s) for s in segments(1)] == [1] and sum(len(s) for s in segments(80)) == 80 and len(segments(80)) == 9


def test_a_segment_notices_what_happens_between_its_blocks():
    model = build("llama", "sqrt")
    first, second, *_ = model.blocks
    x = torch.ones(1, LENGTH, 32)
    with pytest.raises(RunError, match="does more between its blocks"):
        rope = model.config.rope(0).angles(torch.arange(LENGTH)[None])
        second(first(x, rope, None) + 1, rope, None)


class Noisy(torch.nn.Module):
    """Draws random numbers, keeps some of them, and draws more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight * torch.rand_like(x) + torch.randn_like(x)).exp() * self.weight.sin() * torch.rand_like(x)


def test_random_numbers_agree_where_some_are_kept():
    straight, again = Noisy(), Noisy()
    recompute(again, keeping(lambda: lambda packet, number: packet == torch.ops.aten.rand_like and number == 0))
    for module in (straight, again):
        torch.manual_seed(3)
        module(torch.ones(4, 3)).sum().backward()
    assert torch.equal(straight.weight.grad, again.weight.grad)


class Overwriting(torch.nn.Module):
    """Of a product of more than two dimensions a view is overwritten that does not count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3, bias=False)
        torch.nn.init.eye_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x).mul_(2) * 3).sin()


def test_a_kept_result_that_is_overwritten_is_computed_again():
    straight, again = Overwriting(), Overwriting()
    recompute(again, keeping(lambda: lambda packet, number: packet == torch.ops.aten.mm))
    for module in (straight, again):
        module(torch.ones(2, 5, 3)).sum().backward()
    assert torch.equal(straight.linear.weight.grad, again.linear.weight.grad)


REFUSED = [
    ("selective", {"save": ["aten.add_"]}, "overwrites what it is given"),
    ("every_n", {"n": 0}, "activation.n: 0 is too small"),
    ("every_n", {"n": 9}, "more than the model's 5 blocks"),
    ("ratio", {"ratio": 1.5}, "not between 0 and 1"),
    ("modules", {"patterns": ["*.mpl"]}, "'\\*.mpl' is no module inside the blocks; there are layers.0, layers.0.input_layernorm"),
    ("modules", {"patterns": []}, "use activation=none"),
    ("selective", {"save": ["atten.mm"]}, "torch has no operator 'atten.mm'"),
    ("selective", {"matmul_every": 0}, "the least is 1"),
]


@pytest.mark.parametrize("name, options, message", REFUSED)
def test_what_makes_no_sense_is_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        build("llama", name, **options)
