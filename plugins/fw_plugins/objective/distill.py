"""Knowledge distillation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from fw.api import (
    CONTEXT,
    IGNORED,
    TENSOR,
    Beside,
    CausalLM,
    Conflicts,
    Head,
    LinearHead,
    ObjectivePlugin,
    Readout,
    UserError,
    find,
    read_config,
    weights_digest,
)
from fw_plugins.objective.answers import DESCRIPTION, AnswerFiles, Answers, AnswerWriter, Asked, row_keys
from fw_plugins.objective.chunked_loss import TokenLoss, add_product, scaled

Teach = Callable[[slice], Tensor | Answers]
"""Of some of the tokens the teacher's logits ``[T, V]``, or what is known of them."""

_ASKED_TOKENS = 1024
"""Tokens whose logits exist at a time while answers are made."""


@dataclass
class DistillConfig:
    """Who teaches, and how much of the loss is the teacher's."""

    teacher: str
    """Model directory, run of fw's own or `org/name` of the hub; it has the student's tokens. Frozen, in the dtype of compute, and divided
    between ranks as the student's parameters are (fsdp), else whole on each: its weights, and one block's activations."""
    quantization: str = "none"
    """Quantization plugin for its weights, by name; codes that its files hold are kept as they are."""
    offload: Literal["device", "nvme"] = "device"
    """With `nvme`, its matrices stay in its own files, mapped, where they have the dtype of compute: on a CPU they take none of the
    process's memory, and ranks of a host share what the system keeps of them. On one rank or with sharding=ddp."""
    weight: float = 0.5
    """Part of the loss that is the distance from the teacher; the rest is cross-entropy of the next token. 1 needs no labels' values; 0
    leaves the teacher's distribution out, where there is a hidden_weight."""
    hidden_weight: float = 0.0
    """Besides, this times the mean square of what the last hidden states, which the heads see, differ in; both models are as wide. It takes
    tokens · width · 4 bytes."""
    answers: str = ""
    """Directory of what the teacher says of this run's rows, which `fw data teach CONFIG` makes: training then does without it, and with
    its top_k most likely tokens. Takes no device memory but a micro-batch's answers, and tokens · (top_k · 6 + 4) bytes of disk."""
    top_k: int = 64
    """Tokens of which answers keep the probability; all others count as one. No effect without answers."""
    temperature: float = 1.0
    """Both distributions are of logits divided by it; above 1, unlikely tokens count for more. The distance is multiplied with its square,
    which keeps gradients as large (https://arxiv.org/abs/1503.02531, section 2). No effect on memory."""
    chunk_tokens: int = 0
    """Tokens whose logits, of both models, exist at a time; 0 for all of a micro-batch, which takes tokens · vocabulary · 4 bytes several
    times. Of a student's head that is no plain product (adapters on it, stage 3 of zero) the teacher's logits are all kept."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1 or (self.weight == 0 and not self.hidden_weight):
            raise UserError(f"objective.weight: {self.weight} is not above 0 and at most 1; without a teacher use objective=causal_lm")
        if self.hidden_weight < 0:
            raise UserError(f"objective.hidden_weight: {self.hidden_weight} is negative")
        if self.answers and self.hidden_weight:
            raise UserError("objective.hidden_weight: files of answers hold no hidden states; leave objective.answers out")
        if self.top_k < 1:
            raise UserError(f"objective.top_k: {self.top_k} is too small; the least is 1")
        if self.temperature <= 0:
            raise UserError(f"objective.temperature: {self.temperature} is not above 0")
        if self.chunk_tokens < 0:
            raise UserError(f"objective.chunk_tokens: {self.chunk_tokens} is negative")


@dataclass(frozen=True)
class DistillLoss:
    """``w · τ² · KL(p ‖ q) + (1 - w) · CE`` of a token, p of the teacher's logits and q of the student's, both divided by τ.

    Of a teacher's answers, which know the most likely tokens, p and q are of these and of all others as one: no more than the whole KL.
    """

    weight: float
    temperature: float

    def of_logits(self, z_TV: Tensor, teacher: Tensor | Answers, labels_T: Tensor) -> tuple[Tensor, Tensor]:
        """KL and cross-entropy, each summed over tokens; with a graph."""
        counted_T = labels_T != IGNORED
        if isinstance(teacher, Answers):
            kl_T = self._of_answers(z_TV / self.temperature, teacher)
        else:
            logq_TV = (z_TV / self.temperature).log_softmax(-1)
            logp_TV = (teacher / self.temperature).log_softmax(-1)
            kl_T = F.kl_div(logq_TV, logp_TV, log_target=True, reduction="none").sum(-1)
        return (kl_T * counted_T).sum(), F.cross_entropy(z_TV, labels_T, ignore_index=IGNORED, reduction="sum")

    @staticmethod
    def _of_answers(z_TV: Tensor, teacher: Answers) -> Tensor:
        all_T = z_TV.logsumexp(-1)
        logq_Tk = z_TV.gather(-1, teacher.ids_Tk) - all_T[:, None]
        others_T = z_TV.scatter(-1, teacher.ids_Tk, -torch.inf).logsumexp(-1) - all_T  # 1 - Σ q would be noise where that is little
        kl_T = (teacher.logp_Tk.exp() * (teacher.logp_Tk - logq_Tk)).sum(-1)
        return kl_T + teacher.rest_T.exp() * (teacher.rest_T - others_T)

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

    def __init__(self, config: DistillConfig) -> None:
        super().__init__(config)
        self.figures = ("distill/kl", "distill/cross_entropy", *(["distill/hidden"] if config.hidden_weight else []))
        self._teacher: CausalLM | None = None
        self._answers: AnswerFiles | None = None
        self._sums: Tensor | None = None

    @property
    def beside(self) -> Beside | None:
        """The teacher, unless it has given its answers."""
        return None if self.config.answers else self._asks

    @property
    def ahead(self) -> Beside | None:
        """The teacher, where its answers are to be kept."""
        return self._asks if self.config.answers else None

    @property
    def _asks(self) -> Beside:
        return Beside(self.config.teacher, self.config.quantization, "objective.teacher", in_files=self.config.offload == "nvme")

    def answer(self, model: CausalLM, batches: Iterable[Mapping[str, Tensor]]) -> None:
        """The most likely tokens after each of every row; rows that are in the files already are not asked about again."""
        writer = AnswerWriter(Path(self.config.answers), self._asked(model.vocab_size, find(self.config.teacher)))
        try:
            for batch in batches:
                self._ask(model, batch, writer)
        finally:  # what an interrupted pass has found is kept
            writer.close()

    def _ask(self, model: CausalLM, batch: Mapping[str, Tensor], writer: AnswerWriter) -> None:
        keys, lengths = row_keys(batch)
        if not any(length and key not in writer.known for key, length in zip(keys, lengths, strict=True)):
            return

        def readout(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            for x_LD, key, length in zip(x_BLD, keys, lengths, strict=True):
                if length:
                    parts = [self._likely(head(some[None])[0].float()) for some in x_LD[:length].split(_ASKED_TOKENS)]
                    writer.add(key, Answers(*(torch.cat(of).cpu() for of in zip(*parts, strict=True))))
            return x_BLD.new_zeros(())

        with torch.no_grad():
            model(batch["input_ids"], positions_BL=batch.get("positions"), segments_BL=batch.get("segments"), readout=readout)

    def _likely(self, z_TV: Tensor) -> Answers:
        logp_TV = (z_TV / self.config.temperature).log_softmax(-1)
        logp_Tk, ids_Tk = logp_TV.topk(self.config.top_k, -1)
        return Answers(ids_Tk, logp_Tk, logp_TV.scatter(-1, ids_Tk, -torch.inf).logsumexp(-1))

    def _asked(self, vocab_size: int, teacher: Path | None = None) -> Asked:
        c = self.config
        if c.top_k >= vocab_size:
            raise UserError(f"objective.top_k: {c.top_k} is not below the {vocab_size} tokens that there are")
        if teacher is None and Path(c.teacher).is_dir():  # a hub's may not be here, nor any other once it has answered
            teacher = find(c.teacher)
        return Asked(c.teacher, "" if teacher is None else weights_digest(teacher), c.quantization, c.temperature, c.top_k, vocab_size)

    def use(self, model: CausalLM) -> None:
        """As the teacher."""
        if self.config.hidden_weight and not model.shows_hidden_states:
            raise UserError("objective.hidden_weight: the teacher shows logits and no hidden states; use 0")
        self._teacher = model

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int]) -> None:
        """Each rank has all logits of its tokens."""
        if mesh_shape.get(TENSOR, 1) > 1:
            raise UserError(f"sharding.{TENSOR}: ranks would have parts of the vocabulary, over all of which distributions are; use 1")
        if self.config.answers:
            if mesh_shape.get(CONTEXT, 1) > 1:
                raise UserError(f"sharding.{CONTEXT}: answers are looked up by whole rows, of which ranks would have parts; use 1")
            AnswerFiles(Path(self.config.answers), self._asked(model.vocab_size))
        if self.config.hidden_weight:
            if not model.shows_hidden_states:
                raise UserError("objective.hidden_weight: this model shows logits and no hidden states (model: hf); use 0")
            own, theirs = _width(model.hf_config()), _width(read_config(find(self.config.teacher)))
            if own != theirs:
                raise UserError(f"objective.hidden_weight: hidden states of the teacher have {theirs} numbers, this model's {own}; use 0")

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Target tokens."""
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Summed over tokens, a fp32 scalar."""
        given = {"positions_BL": batch.get("positions"), "segments_BL": batch.get("segments")}
        labels_T = batch["labels"].flatten()
        if not model.training or not torch.is_grad_enabled():
            return self._next_token(model, batch["input_ids"], labels_T, given)
        if self.config.answers:
            answers = self._answers_to(model, batch)
            loss: Tensor = model(batch["input_ids"], **given, readout=self._readout(answers.rows, None, labels_T))
            return loss
        assert self._teacher is not None
        found: list[Tensor] = []

        def taught(teacher_BLD: Tensor, teacher_head: Head, auxiliary: Tensor | None) -> Tensor:
            # The student computes while the teacher's head is there, wherever that is kept otherwise.
            teacher_TD = teacher_BLD.flatten(0, 1)

            def teach(rows: slice) -> Tensor:
                with torch.no_grad():
                    return teacher_head(teacher_TD[rows][None]).flatten(0, 1).float()

            with torch.enable_grad():
                found.append(model(batch["input_ids"], **given, readout=self._readout(teach, teacher_TD, labels_T)))
            return teacher_BLD.new_zeros(())

        with torch.no_grad():
            self._teacher(batch["input_ids"], **given, readout=taught)
        return found[0]

    def take_figures(self) -> tuple[list[float], int]:
        """Sums since the last call, and of how many tokens."""
        *sums, tokens = [0.0] * (len(self.figures) + 1) if self._sums is None else self._sums.tolist()
        self._sums = None
        return sums, int(tokens)

    def _answers_to(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Answers:
        ids_BL = batch["input_ids"]
        if isinstance(ids_BL, FakeTensor):  # of a plan: rows without tokens
            shape, k = ids_BL.numel(), self.config.top_k
            ids_Tk, logp_Tk = ids_BL.new_empty((shape, k)), ids_BL.new_empty((shape, k), dtype=torch.float32)
            return Answers(ids_Tk, logp_Tk, logp_Tk.new_empty(shape))
        if self._answers is None:
            whose = json.loads((Path(self.config.answers) / DESCRIPTION).read_text())  # checked before
            self._answers = AnswerFiles(Path(self.config.answers), self._asked(whose["vocab_size"]))
        return self._answers.of(batch)

    def _readout(self, teach: Teach, teacher_TD: Tensor | None, labels_T: Tensor) -> Readout:
        def readout(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            loss = self._loss(x_BLD.flatten(0, 1), head, teach, teacher_TD, labels_T)
            return loss if auxiliary is None else loss + auxiliary * (labels_T != IGNORED).sum()

        return readout

    def _next_token(self, model: nn.Module, ids_BL: Tensor, labels_T: Tensor, given: Mapping[str, Tensor | None]) -> Tensor:
        def readout(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            return self._entropy(x_BLD.flatten(0, 1), head, labels_T)

        loss: Tensor = model(ids_BL, **given, readout=readout)
        return loss

    def _loss(self, x_TD: Tensor, head: Head, teach: Teach, teacher_TD: Tensor | None, labels_T: Tensor) -> Tensor:
        loss, tokens = DistillLoss(self.config.weight, self.config.temperature), self.config.chunk_tokens
        if not self.config.weight:
            kl, entropy = labels_T.new_zeros((), dtype=torch.float32), self._entropy(x_TD, head, labels_T)
            whole = entropy
        elif 0 < tokens < len(labels_T) and isinstance(head, LinearHead) and not self.config.answers:
            whole, kl, entropy = _Chunked.apply(x_TD, head.weight_VD, teach, labels_T, loss, head.softcap, tokens)
        elif 0 < tokens < len(labels_T):
            kl, entropy = self._again(x_TD, head, teach, labels_T, loss, tokens)
            whole = loss.whole(kl, entropy)
        else:
            kl, entropy = loss.of_logits(head(x_TD[None]).flatten(0, 1).float(), teach(slice(None)), labels_T)
            whole = loss.whole(kl, entropy)
        sums = [kl.detach(), entropy.detach()]
        if self.config.hidden_weight and teacher_TD is not None:
            difference_T = (x_TD.float() - teacher_TD.float()).square().mean(-1)
            hidden = (difference_T * (labels_T != IGNORED)).sum()
            whole = whole + self.config.hidden_weight * hidden
            sums.append(hidden.detach())
        self._note(sums, labels_T)
        found: Tensor = whole
        return found

    def _entropy(self, x_TD: Tensor, head: Head, labels_T: Tensor) -> Tensor:
        tokens = self.config.chunk_tokens
        if 0 < tokens < len(labels_T):
            return TokenLoss().chunked(x_TD, head, labels_T, tokens)
        return TokenLoss().of_logits(head(x_TD[None]).flatten(0, 1).float(), labels_T)

    def _again(self, x_TD: Tensor, head: Head, teach: Teach, labels_T: Tensor, loss: DistillLoss, tokens: int) -> tuple[Tensor, Tensor]:
        """KL and cross-entropy of a head that is no plain product: in backward the student's logits of a chunk are computed again, the
        teacher's are kept, since its head may be gone by then."""

        def of(x_cD: Tensor, teacher: Tensor | Answers, labels_c: Tensor) -> Tensor:
            return torch.stack(loss.of_logits(head(x_cD[None]).flatten(0, 1).float(), teacher, labels_c))

        parts = [slice(first, first + tokens) for first in range(0, len(x_TD), tokens)]
        sums = [checkpoint(of, x_TD[rows], teach(rows), labels_T[rows], use_reentrant=False) for rows in parts]
        kl, entropy = torch.stack(sums).sum(0).unbind()
        return kl, entropy

    def _note(self, figures: Sequence[Tensor], labels_T: Tensor) -> None:
        sums = torch.stack([*figures, (labels_T != IGNORED).sum().to(figures[0].dtype)])
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
        grad_weight_VD = torch.empty_like(weight_VD, dtype=torch.float32) if wants_weight else None
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
                    add_product(grad_weight_VD, grad_cV, x_cD, to_nothing=first == 0)
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


def _width(raw: Mapping[str, Any]) -> int | None:
    return raw.get("hidden_size") or raw.get("n_embd")
