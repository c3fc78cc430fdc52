"""Knowledge distillation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fw.api import IGNORED, TENSOR, Beside, CausalLM, Conflicts, Head, LinearHead, ObjectivePlugin, UserError
from fw_plugins.objective.chunked_loss import TokenLoss, add_product, scaled


@dataclass
class DistillConfig:
    """Who teaches, and how much of the loss is the teacher's."""

    teacher: str
    """Model directory, run of fw's own or `org/name` of the hub; it has the student's tokens. Frozen, in the dtype of compute, and divided
    between ranks as the student's parameters are (fsdp), else whole on each: its weights, and one block's activations."""
    quantization: str = "none"
    """Quantization plugin for its weights, by name; codes that its files hold are kept as they are."""
    weight: float = 0.5
    """Part of the loss that is the distance from the teacher; the rest is cross-entropy of the next token. 1 needs no labels' values."""
    temperature: float = 1.0
    """Both distributions are of logits divided by it; above 1, unlikely tokens count for more. The distance is multiplied with its square,
    which keeps gradients as large (https://arxiv.org/abs/1503.02531, section 2). No effect on memory."""
    chunk_tokens: int = 0
    """Tokens whose logits, of both models, exist at a time; 0 for all of a micro-batch, which takes tokens · vocabulary · 4 bytes several
    times. Of a student's head that is no plain product (adapters on it, stage 3 of zero) the teacher's logits are all kept."""

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise UserError(f"objective.weight: {self.weight} is not above 0 and at most 1; without a teacher use objective=causal_lm")
        if self.temperature <= 0:
            raise UserError(f"objective.temperature: {self.temperature} is not above 0")
        if self.chunk_tokens < 0:
            raise UserError(f"objective.chunk_tokens: {self.chunk_tokens} is negative")


@dataclass(frozen=True)
class DistillLoss:
    """``w · τ² · KL(p ‖ q) + (1 - w) · CE`` of a token, p of the teacher's logits and q of the student's, both divided by τ."""

    weight: float
    temperature: float

    def of_logits(self, z_TV: Tensor, teacher_TV: Tensor, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """KL and cross-entropy, each summed over tokens; with a graph."""
        counted_T = labels_T != IGNORED
        logq_TV = (z_TV / self.temperature).log_softmax(-1)
        logp_TV = (teacher_TV / self.temperature).log_softmax(-1)
        kl = (F.kl_div(logq_TV, logp_TV, log_target=True, reduction="none").sum(-1) * counted_T).sum()
        return kl, F.cross_entropy(z_TV, labels_T, ignore_index=IGNORED, reduction="sum")

    def whole(self, kl: Tensor, entropy: Tensor) -> Tensor:
        """Of both sums."""
        return self.weight * self.temperature**2 * kl + (1 - self.weight) * entropy


class Distill(ObjectivePlugin):
    """The student's distribution comes nearer to a teacher's, and to the next token (Hinton et al. 2015). Averaged over target tokens.

    The teacher is frozen, and may be quantized. Validation is of the next token alone.
    """

    api = 1
    conflicts = (Conflicts("data", ("preference",), "it would learn rejected answers as it does chosen ones; use objective=dpo"),)
    Config = DistillConfig
    config: DistillConfig
    figures: ClassVar[tuple[str, ...]] = ("distill/kl", "distill/cross_entropy")

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self._teacher: CausalLM | None = None
        self._sums: Tensor | None = None

    @property
    def beside(self) -> Beside:
        """The teacher."""
        return Beside(self.config.teacher, self.config.quantization, "objective.teacher")

    def use(self, model: CausalLM) -> None:
        """As the teacher."""
        self._teacher = model

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int]) -> None:
        """Each rank has all logits of its tokens."""
        if mesh_shape.get(TENSOR, 1) > 1:
            raise UserError(f"sharding.{TENSOR}: ranks would have parts of the vocabulary, over all of which distributions are; use 1")

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Target tokens."""
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Summed over tokens, a fp32 scalar."""
        given = {"positions_BL": batch.get("positions"), "segments_BL": batch.get("segments")}
        labels_T = batch["labels"].flatten()
        if not model.training or not torch.is_grad_enabled():
            return self._next_token(model, batch["input_ids"], labels_T, given)
        assert self._teacher is not None
        found: list[Tensor] = []

        def taught(teacher_BLD: Tensor, teacher_head: Head, auxiliary: Tensor | None) -> Tensor:
            # The student computes while the teacher's head is there, wherever that is kept otherwise.
            def readout(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
                loss = self._loss(x_BLD.flatten(0, 1), head, teacher_BLD.flatten(0, 1), teacher_head, labels_T)
                return loss if auxiliary is None else loss + auxiliary * (labels_T != IGNORED).sum()

            with torch.enable_grad():
                found.append(model(batch["input_ids"], **given, readout=readout))
            return teacher_BLD.new_zeros(())

        with torch.no_grad():
            self._teacher(batch["input_ids"], **given, readout=taught)
        return found[0]

    def take_figures(self) -> tuple[list[float], int]:
        """Sums since the last call, and of how many tokens."""
        *sums, tokens = [0.0] * (len(self.figures) + 1) if self._sums is None else self._sums.tolist()
        self._sums = None
        return sums, int(tokens)

    def _next_token(self, model: nn.Module, ids_BL: Tensor, labels_T: Tensor, given: Mapping[str, Tensor | None]) -> Tensor:
        tokens = self.config.chunk_tokens

        def readout(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            if 0 < tokens < len(labels_T):
                return TokenLoss().chunked(x_BLD.flatten(0, 1), head, labels_T, tokens)
            return TokenLoss().of_logits(head(x_BLD).flatten(0, 1).float(), labels_T)

        loss: Tensor = model(ids_BL, **given, readout=readout)
        return loss

    def _loss(self, x_TD: Tensor, head: Head, teacher_TD: Tensor, teacher_head: Head, labels_T: Tensor) -> Tensor:
        loss, tokens = DistillLoss(self.config.weight, self.config.temperature), self.config.chunk_tokens

        def teach(rows: slice) -> Tensor:
            with torch.no_grad():
                return teacher_head(teacher_TD[rows][None]).flatten(0, 1).float()

        if 0 < tokens < len(labels_T) and isinstance(head, LinearHead):
            whole, kl, entropy = _Chunked.apply(x_TD, head.weight_VD, teach, labels_T, loss, head.softcap, tokens)
        elif 0 < tokens < len(labels_T):
            kl, entropy = self._again(x_TD, head, teach, labels_T, loss, tokens)
            whole = loss.whole(kl, entropy)
        else:
            kl, entropy = loss.of_logits(head(x_TD[None]).flatten(0, 1).float(), teach(slice(None)), labels_T)
            whole = loss.whole(kl, entropy)
        self._note(kl.detach(), entropy.detach(), labels_T)
        found: Tensor = whole
        return found

    def _again(
        self, x_TD: Tensor, head: Head, teach: Callable[[slice], Tensor], labels_T: Tensor, loss: DistillLoss, tokens: int
    ) -> tuple[Tensor, Tensor]:
        """KL and cross-entropy of a head that is no plain product: in backward the student's logits of a chunk are computed again, the
        teacher's are kept, since its head may be gone by then."""

        def of(x_cD: Tensor, teacher_cV: Tensor, labels_c: Tensor) -> Tensor:
            return torch.stack(loss.of_logits(head(x_cD[None]).flatten(0, 1).float(), teacher_cV, labels_c))

        parts = [slice(first, first + tokens) for first in range(0, len(x_TD), tokens)]
        sums = [checkpoint(of, x_TD[rows], teach(rows), labels_T[rows], use_reentrant=False) for rows in parts]
        kl, entropy = torch.stack(sums).sum(0).unbind()
        return kl, entropy

    def _note(self, kl: Tensor, entropy: Tensor, labels_T: Tensor) -> None:
        sums = torch.stack([kl, entropy, (labels_T != IGNORED).sum().to(kl.dtype)])
        self._sums = sums if self._sums is None else self._sums + sums


class _Chunked(torch.autograd.Function):
    """The loss of a linear head, some tokens at a time: gradients of a chunk are computed while its logits are there."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_VD: Tensor, teach: Any, labels_T: Tensor, loss: DistillLoss, softcap: float | None, tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = x_TD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_TD.dtype
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        product_VD = weight_VD.detach().to(dtype)
        sums = torch.zeros(2, device=x_TD.device)
        grad_x_TD = torch.empty_like(x_TD) if wants_x else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if wants_weight else None
        for first in range(0, len(x_TD), tokens):
            rows = slice(first, first + tokens)
            teacher_cV = teach(rows)
            with torch.autocast(device, enabled=False):
                x_cD = x_TD[rows].detach().to(dtype)
                both, grad_cV = _chunk(F.linear(x_cD, product_VD).float(), teacher_cV, labels_T[rows], loss, softcap)
                del teacher_cV
                sums += both
                grad_cV = grad_cV.to(dtype)
                if grad_x_TD is not None:
                    grad_x_TD[rows] = grad_cV @ product_VD
                if grad_weight_VD is not None:
                    add_product(grad_weight_VD, grad_cV, x_cD)
                del grad_cV  # before the next chunk's logits
        ctx.gradients = grad_x_TD, None if grad_weight_VD is None else grad_weight_VD.to(weight_VD.dtype)
        kl, entropy = sums.unbind()
        kl, entropy = kl.clone(), entropy.clone()
        ctx.mark_non_differentiable(kl, entropy)
        return loss.whole(kl, entropy), kl, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (*scaled(ctx, grad), None, None, None, None, None)


def _chunk(z_cV: Tensor, teacher_cV: Tensor, labels_c: Tensor, loss: DistillLoss, softcap: float | None) -> tuple[Tensor, Tensor]:
    """KL and cross-entropy of a chunk, and the gradient of the loss by the product's result ``z_cV``."""
    slope_cV = None
    if softcap is not None:
        slope_cV = z_cV.div_(softcap).tanh_()
        z_cV = slope_cV * softcap
    counted_c1 = (labels_c != IGNORED)[:, None]
    labels_c1 = labels_c.where(counted_c1[:, 0], 0)[:, None]
    heat = loss.temperature
    logp_cV, logq_cV = (teacher_cV / heat).log_softmax(-1), (z_cV / heat).log_softmax(-1)
    kl = (F.kl_div(logq_cV, logp_cV, log_target=True, reduction="none").sum(-1, keepdim=True) * counted_c1).sum()
    # ∂ τ² KL / ∂z = τ (q - p), and ∂ CE / ∂z = softmax(z) - 1 at the label.
    grad_cV = logq_cV.exp_().sub_(logp_cV.exp_()).mul_(loss.weight * heat)
    del logp_cV, logq_cV
    logs_cV = z_cV.log_softmax(-1)
    entropy = -(logs_cV.gather(1, labels_c1) * counted_c1).sum()
    grad_cV.add_(logs_cV.exp_(), alpha=1 - loss.weight)
    grad_cV.scatter_add_(1, labels_c1, torch.full_like(labels_c1, loss.weight - 1, dtype=grad_cV.dtype))
    grad_cV.mul_(counted_c1)
    if slope_cV is not None:
        grad_cV.mul_(slope_cV.square_().neg_().add_(1))
    return torch.stack([kl, entropy]), grad_cV
