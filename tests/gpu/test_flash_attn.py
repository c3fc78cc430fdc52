"""The package flash-attn on a GPU, against scores written out in fp32, and its operator among what recomputation keeps."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fw.kinds.attention import Pattern
from fw.kinds.precision import PrecisionPolicy
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.eager import EagerAttention
from fw_plugins.attention.flash_attn import FlashAttention, FlashAttentionConfig
from plugins.test_activation import LENGTH, SPEC, batch, initialise, plugin

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
CUDA = torch.device("cuda")
SPEC_OF_A_GPU = dataclasses.replace(SPEC, device_type="cuda", precision=PrecisionPolicy(torch.float32, torch.bfloat16, torch.float32))
SEGMENTS = [[0] * 40 + [1] * 100 + [2] * 60, [3] * 199 + [4]]


@pytest.fixture(autouse=True)
def package():
    pytest.importorskip("flash_attn")


def flash() -> FlashAttention:
    return FlashAttention(FlashAttentionConfig(deterministic=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [20, 64, 256])
@pytest.mark.parametrize("window", [None, 1, 33])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document", "several"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_results_and_gradients_are_those_of_scores_written_out(dtype, head_dim, window, segments, softcap):
    generator = torch.Generator().manual_seed(0)
    q, k, v, cotangent = (torch.randn(2, heads, 200, head_dim, generator=generator).to(CUDA, dtype) for heads in (4, 2, 2, 4))
    pattern = Pattern(200, window, None if segments is None else torch.tensor(segments, device=CUDA))
    results = []
    for made, wide in ((EagerAttention(None), torch.float32), (flash(), dtype)):
        given = [x.to(wide).requires_grad_() for x in (q, k, v)]
        out = made.attend(*given, made.plan(pattern, CUDA), scale=head_dim**-0.5, softcap=softcap)
        assert out.shape == q.shape and out.dtype == wide
        results.append([out, *torch.autograd.grad(out, given, cotangent.to(wide))])
    for name, expected, found in zip(("out", "q", "k", "v"), *results, strict=True):
        assert (found.float() - expected).norm() < 0.02 * expected.norm(), name


def test_dropout_drops_and_keeps_the_mean():
    q, k = (torch.randn(1, 4, 256, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    v = torch.ones_like(q)
    made = flash()
    out = made.attend(q, k, v, made.plan(Pattern(256), CUDA), scale=0.1, dropout=0.5).float()
    assert out[..., 128:, :].mean().item() == pytest.approx(1, abs=0.1) and out.std() > 0.05


@pytest.mark.parametrize("segments", [False, True])
def test_what_recomputation_keeps_leaves_the_generator_where_the_kernel_would(segments):
    expected = None
    for name in ("none", "full", "selective", "sqrt"):
        with torch.device("meta"):
            shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "attention_dropout": 0.2}
            model = Llama(LlamaConfig(**shape), 50, LENGTH, flash())
        flash().check(model, SPEC_OF_A_GPU)
        plugin(name).apply(model, SPEC, LENGTH)
        model.materialise(CUDA)
        for parameter, tensor in model.named_parameters():
            initialise(tensor.data, parameter, model.init(parameter), 0)
        torch.manual_seed(1)
        documents = torch.arange(LENGTH, device=CUDA).div(10, rounding_mode="floor").expand(2, -1) if segments else None
        with torch.autocast("cuda", torch.bfloat16):
            readout = lambda x, head, extra: head(x).float().logsumexp(-1).sum()  # noqa: E731
            loss = model.train()(batch().to(CUDA), segments_BL=documents, readout=readout)
        loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        expected = expected or found
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max()))
