"""Direct preference optimization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fw.api import CONTEXT, IGNORED, TENSOR, CausalLM, Conflicts, Head, ObjectivePlugin, UserError, without_adapters


@dataclass
class DPOConfig:
    """How strongly a preference is held against the reference."""

    beta: float = 0.1
    """Weight of the distance from the reference: the larger, the nearer the model stays to it. No effect on memory."""
    loss: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    """`sigmoid`: DPO (https://arxiv.org/abs/2305.18290, equation 7); `hinge`: SLiC's on the same margin (https://arxiv.org/abs/2305.10425);
    `ipo`: squared distance of the margin per token from 1 / (2 beta) (https://arxiv.org/abs/2310.12036). No effect on memory."""
    label_smoothing: float = 0.0
    """The probability that a preference is the other way round; for `sigmoid` (conservative DPO, https://arxiv.org/abs/2305.18290). No
    effect on memory."""
    chunk_tokens: int = 0
    """Tokens whose logits exist at a time, computed again in backward; 0 for all of a micro-batch. The logits and what is computed from
    them take tokens · vocabulary · 4 bytes several times."""

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise UserError(f"objective.beta: {self.beta} is not above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise UserError(f"objective.label_smoothing: {self.label_smoothing} is not from 0 to below 0.5")
        if self.label_smoothing and self.loss != "sigmoid":
            raise UserError(f"objective.label_smoothing: loss={self.loss} has none; leave it out, or use loss=sigmoid")
        if self.chunk_tokens < 0:
            raise UserError(f"objective.chunk_tokens: {self.chunk_tokens} is negative")


class DPO(ObjectivePlugin):
    """Of two answers the chosen one becomes likelier, and the rejected one less likely, than in the model without its adapters (DPO).

    That is the reference, so that there is no second copy. Averaged over pairs. A pair is two segments of a row, first the chosen, then
    the rejected one.
    """

    api = 1
    conflicts = (Conflicts("data", ("synthetic", "text", "jsonl", "chat"), "it compares two answers to the same; use data=preference"),)
    Config = DPOConfig
    config: DPOConfig
    is_likelihood = False
    figures = ("rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy")

    def __init__(self, config: DPOConfig) -> None:
        super().__init__(config)
        self._sums: Tensor | None = None

    def check(self, model: CausalLM, mesh_shape: Mapping[str, int]) -> None:
        """There is a reference, and each rank has whole rows."""
        if model.adapters is None:
            raise UserError("objective.name: dpo compares with the model without its adapters; choose some, as peft=lora")
        if whole := sorted(set(model.adapters.tensors) - set(model.adapters.added)):
            raise UserError(f"peft.name: {whole[0]} trains itself, so that without adapters the reference is not there; leave it frozen")
        if model.virtual_tokens:
            raise UserError("peft.name: virtual tokens stand before a row, which both answers of a pair share; use peft=lora")
        for dimension in (CONTEXT, TENSOR):
            if mesh_shape.get(dimension, 1) > 1:
                raise UserError(f"sharding.{dimension}: ranks would have parts of an answer, whose likelihood dpo wants; use 1")

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Pairs whose chosen answer has something to learn: of a long prompt's, nothing may be left of it."""
        segments_BL = batch["segments"]
        chosen_BL = (segments_BL % 2 == 1) & (batch["labels"] != IGNORED)
        row_BL = torch.arange(len(segments_BL), device=segments_BL.device)[:, None] * (segments_BL.amax() + 1)
        return len((row_BL + segments_BL)[chosen_BL].unique())

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Summed over pairs, a fp32 scalar."""
        with torch.no_grad(), without_adapters():
            reference_S, _, _ = self._answers(model, batch)
        policy_S, tokens_S, auxiliary = self._answers(model, batch)
        change_S = policy_S - reference_S
        if self.config.loss == "ipo":
            change_S = change_S / tokens_S.clamp(min=1)
        chosen_P, rejected_P, there_P = change_S[0::2], change_S[1::2], tokens_S[0::2] > 0
        if torch.is_grad_enabled():
            self._note(chosen_P.detach(), rejected_P.detach(), there_P)
        # What the model adds to a mean (routers' balance) it adds to that of pairs.
        return ((self._loss(chosen_P - rejected_P) + auxiliary) * there_P).sum()

    def take_figures(self) -> tuple[list[float], int]:
        """Rewards since the last call, and of how many pairs."""
        *sums, pairs = [0.0] * (len(self.figures) + 1) if self._sums is None else self._sums.tolist()
        self._sums = None
        return sums, int(pairs)

    def _loss(self, margin_P: Tensor) -> Tensor:
        beta, smoothing = self.config.beta, self.config.label_smoothing
        if self.config.loss == "hinge":
            return F.relu(1 - beta * margin_P)
        if self.config.loss == "ipo":
            return (margin_P - 1 / (2 * beta)).square()
        return -(1 - smoothing) * F.logsigmoid(beta * margin_P) - smoothing * F.logsigmoid(-beta * margin_P)

    def _note(self, chosen_P: Tensor, rejected_P: Tensor, there_P: Tensor) -> None:
        """Where there is no pair, all are 0."""
        margin_P = chosen_P - rejected_P
        beta = self.config.beta
        sums = torch.stack([beta * chosen_P.sum(), beta * rejected_P.sum(), beta * margin_P.sum(), (margin_P > 0).sum(), there_P.sum()])
        self._sums = sums if self._sums is None else self._sums + sums

    def _answers(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-likelihood of each segment's targets, row by row in their order, how many it has, and what the model adds to the loss.

        Both have room for as many as there are tokens, since nobody on the host knows how many segments there are; behind the last one
        both are 0.
        """
        labels_T, segments_BL = batch["labels"].flatten(), batch["segments"]
        last_B = segments_BL.amax(dim=1)
        before_B = last_B.cumsum(0) - last_B
        segment_T = (segments_BL - 1 + before_B[:, None]).clamp(min=0).flatten()  # padding counts for nothing, wherever it goes
        room = len(labels_T) + len(labels_T) % 2

        def readout(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            logp_T = self._logps(x_BLD.flatten(0, 1), head, labels_T)
            answers_S = logp_T.new_zeros(room).index_add(0, segment_T, logp_T)
            # All that has a gradient leaves the model by the one way that shards and wrappers watch.
            return torch.cat([answers_S, logp_T.new_zeros(1) if auxiliary is None else auxiliary.float().reshape(1)])

        out: Tensor = model(batch["input_ids"], positions_BL=batch.get("positions"), segments_BL=segments_BL, readout=readout)
        counted_T = (labels_T != IGNORED).to(out.dtype)
        return out[:-1], counted_T.new_zeros(room).index_add(0, segment_T, counted_T), out[-1]

    def _logps(self, x_TD: Tensor, head: Head, labels_T: Tensor) -> Tensor:
        """Of each target, 0 where there is none; fp32."""

        def of(x_cD: Tensor, labels_c: Tensor) -> Tensor:
            return -F.cross_entropy(head(x_cD[None]).flatten(0, 1).float(), labels_c, ignore_index=IGNORED, reduction="none")

        tokens = self.config.chunk_tokens
        if not 0 < tokens < len(labels_T):
            return of(x_TD, labels_T)
        parts = list(zip(x_TD.split(tokens), labels_T.split(tokens), strict=True))
        if not torch.is_grad_enabled():
            return torch.cat([of(x, y) for x, y in parts])
        return torch.cat([checkpoint(of, x, y, use_reentrant=False) for x, y in parts])
