"""Cross-entropy in chunks against the whole: value, gradients, and the bytes it is for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fw.errors import UserError
from fw.kinds.data import IGNORED
from fw.kinds.model import LinearHead
from fw.meter.allocations import allocations
from fw_models.gemma2 import Gemma2, Gemma2Config
from fw_models.gpt2 import GPT2, GPT2Config
from fw_models.llama import Llama, LlamaConfig
from fw_plugins.attention.sdpa import SDPAttention
from fw_plugins.objective.causal_lm import CausalLMConfig, CausalLMObjective
from fw_plugins.objective.chunked_loss import TokenLoss

T, D, V = 45, 16, 101


@pytest.fixture(autouse=True, params=["off", "on"], ids=["torch's operators", "fw's kernels"])
def kernels(request, monkeypatch):
    monkeypatch.setenv("FW_TRAINING_KERNELS", request.param)


LOSSES = [TokenLoss(), TokenLoss(z_loss=0.3), TokenLoss(smoothing=0.2), TokenLoss(z_loss=0.1, smoothing=0.1)]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    weight_VD = nn.Parameter(torch.randn(V, D, generator=generator).to(dtype))
    labels_T = torch.randint(V, (T,), generator=generator)
    labels_T[5:9] = IGNORED
    labels_T[20:30] = IGNORED  # a chunk of which nothing counts
    return x_TD, weight_VD, labels_T


def by_definition(x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, loss: TokenLoss, softcap: float | None) -> Tensor:
    """The formula of :class:`TokenLoss`, token by token, by torch's cross-entropy with its own smoothing."""
    z_TV = (x_TD @ weight_VD.t()).double()
    if softcap:
        z_TV = softcap * torch.tanh(z_TV / softcap)
    ce = F.cross_entropy(z_TV, labels_T, ignore_index=IGNORED, reduction="sum", label_smoothing=loss.smoothing)
    return ce + loss.z_loss * (torch.log(torch.exp(z_TV).sum(-1)) ** 2)[labels_T != IGNORED].sum()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("tokens", [1, 10, 44])
def test_equals_the_definition(loss, softcap, tokens):
    found, expected = [], []
    for into, value in (
        (expected, lambda x, w, y: by_definition(x, w, y, loss, softcap)),
        (found, lambda x, w, y: loss.chunked(x, LinearHead(w, softcap), y, tokens)),
        (found, lambda x, w, y: loss.chunked(x, lambda h: LinearHead(w, softcap)(h), y, tokens)),  # any other head
        (found, lambda x, w, y: loss.of_logits(LinearHead(w, softcap)(x).float(), y)),
    ):
        x_TD, weight_VD, labels_T = inputs()
        total = value(x_TD, weight_VD, labels_T)
        (total * 0.37).backward()
        into.append((total.detach().float(), x_TD.grad, weight_VD.grad))
    for these in found:
        for a, b in zip(these, expected[0], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-5)


def test_in_bf16_the_weights_gradient_is_summed_in_fp32():
    """Against the products in fp32: chunks are no further away than the whole."""
    distances = []
    for tokens in (T, 3):
        with torch.autocast("cpu", torch.bfloat16):
            x_TD, weight_VD, labels_T = inputs()
            value = TokenLoss().of_logits(LinearHead(weight_VD)(x_TD).float(), labels_T)
            if tokens < T:
                value = TokenLoss().chunked(x_TD, LinearHead(weight_VD), labels_T, tokens)
        value.backward()
        x, w, y = inputs()
        by_definition(x, w, y, TokenLoss(), None).backward()
        assert weight_VD.grad.dtype == torch.float32
        distances.append([float((a - b).norm() / b.norm()) for a, b in ((x_TD.grad, x.grad), (weight_VD.grad, w.grad))])
    whole, chunked = distances
    assert all(c <= 1.2 * w < 0.05 for w, c in zip(whole, chunked, strict=True)), distances


def test_what_needs_no_gradient_gets_none():
    x_TD, weight_VD, labels_T = inputs()
    weight_VD.requires_grad_(False)
    TokenLoss().chunked(x_TD, LinearHead(weight_VD), labels_T, 7).backward()
    assert weight_VD.grad is None and x_TD.grad is not None
    with torch.no_grad():
        a = TokenLoss().chunked(x_TD, LinearHead(weight_VD), labels_T, 7)
    torch.testing.assert_close(a, TokenLoss().of_logits(x_TD @ weight_VD.t(), labels_T))


MODELS = {
    "llama": lambda: Llama(LlamaConfig(32, 2, 4, intermediate_size=48), V, 16, SDPAttention(None)),
    "tied": lambda: Llama(LlamaConfig(32, 2, 4, intermediate_size=48, tie_word_embeddings=True), V, 16, SDPAttention(None)),
    "capped": lambda: Gemma2(Gemma2Config(32, 2, 4, 4, intermediate_size=48, final_logit_softcapping=5.0), V, 16, SDPAttention(None)),
    "gpt2": lambda: GPT2(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16), V, 16, SDPAttention(None)),
}


class LoRA(nn.Module):
    """A frozen linear layer and a trained low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, 4) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


@pytest.mark.parametrize("name", [*MODELS, "lora"])
def test_a_models_loss_and_gradients_are_those_of_whole_logits(name):
    torch.manual_seed(0)
    model = MODELS["llama" if name == "lora" else name]()
    if name == "lora":
        model.lm_head = LoRA(model.lm_head)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(32).view(2, 16) * 3 % V
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1).masked_fill(ids % 5 == 0, IGNORED)}
    found = []
    for tokens in (0, 7):
        model.zero_grad()
        objective = CausalLMObjective(CausalLMConfig(z_loss=0.1, label_smoothing=0.1, chunk_tokens=tokens))
        loss = objective.loss_sum(model, batch)
        loss.backward()
        found.append({"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}})
    for key, value in found[0].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_logits_never_exist_together():
    vocabulary, tokens, width = 32_000, 2048, 32
    x_TD = torch.randn(tokens, width, requires_grad=True)
    weight_VD = nn.Parameter(torch.randn(vocabulary, width))
    labels_T = torch.randint(vocabulary, (tokens,))
    x_TD.grad, weight_VD.grad = torch.zeros_like(x_TD), torch.zeros_like(weight_VD)
    peaks = {}
    for chunk in (tokens, 64):
        with allocations(torch.device("cpu")) as found:
            head, loss = LinearHead(weight_VD), TokenLoss()
            value = loss.of_logits(head(x_TD).float(), labels_T) if chunk == tokens else loss.chunked(x_TD, head, labels_T, chunk)
            value.backward()
            del value
        peaks[chunk] = found.peak_bytes
    logits = vocabulary * 4
    assert peaks[tokens] >= 2 * tokens * logits
    kept = weight_VD.nbytes + x_TD.nbytes
    assert kept + 64 * logits <= peaks[64] <= kept + 64 * logits + 300_000


def test_a_factor_that_16_bits_do_not_hold_is_that_of_all_gradients():
    """1/255 in bf16 is 1/256 too much: so would be every gradient but the head's."""
    both = []
    for factor in (1.0, 1 / 255):
        x_TD, weight_VD, labels_T = inputs(torch.bfloat16)
        (TokenLoss().chunked(x_TD, LinearHead(weight_VD), labels_T, T) * factor).backward()
        both.append((x_TD.grad, weight_VD.grad))
    for whole, part in zip(*both, strict=True):
        assert torch.equal(part, (whole.float() * (1 / 255)).bfloat16())


def test_where_nobody_learns_no_gradient_is_computed():
    x_TD, weight_VD, labels_T = inputs()
    with torch.no_grad(), allocations(torch.device("cpu")) as found:
        alone = TokenLoss().chunked(x_TD, LinearHead(weight_VD), labels_T, T)
    assert alone == TokenLoss().chunked(x_TD, LinearHead(weight_VD), labels_T, T).detach()
    assert found.peak_bytes < 4 * T * V + 4 * D * V


def test_a_chunk_of_all_tokens_has_its_gradient_in_the_weights_dtype():
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(8, 64, generator=generator).bfloat16().requires_grad_()
    weight_VD = nn.Parameter(torch.randn(65536, 64, generator=generator).bfloat16())
    with allocations(torch.device("cpu")) as found:
        TokenLoss().chunked(x_TD, LinearHead(weight_VD), torch.arange(8), 8).backward()
    assert weight_VD.nbytes < found.peak_bytes < 2 * weight_VD.nbytes  # its gradient, eight rows of logits, and what oneDNN lays out


def test_a_second_backward_is_refused_in_a_sentence():
    x_TD, weight_VD, labels_T = inputs()
    loss = TokenLoss().chunked(x_TD, LinearHead(weight_VD), labels_T, T)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="another forward"):
        loss.backward()


def test_what_makes_no_sense_is_refused():
    for option in ({"chunk_tokens": -1}, {"label_smoothing": 1.0}, {"z_loss": -0.1}):
        with pytest.raises(UserError, match="objective"):
            CausalLMConfig(**option)


@pytest.mark.parametrize("tokens", [0, 4])
@pytest.mark.parametrize("length", [0, 8], ids=["no tokens", "all ignored"])
def test_where_nothing_counts_the_loss_and_all_gradients_are_zero(length, tokens):
    objective = CausalLMObjective(CausalLMConfig(z_loss=0.1, label_smoothing=0.1, chunk_tokens=tokens))
    hidden = torch.randn(1, length, D, requires_grad=True)
    weight_VD = nn.Parameter(torch.randn(V, D))

    class Readout(nn.Module):
        def forward(self, ids_BL, *, readout, **_):
            return readout(hidden, LinearHead(weight_VD), None)

    labels = torch.full((1, length), IGNORED)
    loss = objective.loss_sum(Readout(), {"input_ids": labels, "labels": labels})
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not weight_VD.grad.any()


def test_of_no_tokens_in_chunks_the_weights_gradient_is_zero():
    weight_VD = nn.Parameter(torch.randn(V, D))
    torch.full((V, D), float("nan"))  # what uninitialised memory may hold
    TokenLoss().chunked(torch.randn(0, D, requires_grad=True), LinearHead(weight_VD), torch.zeros(0, dtype=torch.long), 4).backward()
    assert torch.equal(weight_VD.grad, torch.zeros(V, D))


def test_gradients_that_are_to_be_differentiated_are_refused_in_a_sentence():
    x_TD, weight_VD, labels_T = inputs()
    loss = TokenLoss().chunked(x_TD, LinearHead(weight_VD), labels_T, T)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*objective.chunk_tokens=0"):
        torch.autograd.grad(loss, x_TD, create_graph=True)
