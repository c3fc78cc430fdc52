"""Next-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fw.api import IGNORED, Conflicts, Head, ObjectivePlugin, UserError
from fw_plugins.objective.chunked_loss import TokenLoss, at_once


@dataclass
class CausalLMConfig:
    """What is added to cross-entropy, and how much of it is computed at a time."""

    z_loss: float = 0.0
    """Weight of log²Z per token, which keeps logits from drifting (PaLM, https://arxiv.org/abs/2204.02311); 0 for none. It enters
    the reported training loss, not the validation loss."""
    label_smoothing: float = 0.0
    """Part of the target's probability that is spread over the whole vocabulary (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567);
    0 for none. In the training loss only."""
    chunk_tokens: int = 0
    """Tokens whose logits exist at a time; 0 for all of a micro-batch. The logits and their gradient take tokens · vocabulary · 4 bytes
    (6 to 8 in bf16), without chunks twice that."""

    def __post_init__(self) -> None:
        if self.z_loss < 0 or self.chunk_tokens < 0:
            raise UserError("objective.z_loss and objective.chunk_tokens must not be negative")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"objective.label_smoothing: {self.label_smoothing} is not from 0 to below 1")


class CausalLMObjective(ObjectivePlugin):
    """Cross-entropy of the next token, in fp32, averaged over the target tokens of the whole global batch."""

    api = 1
    conflicts: ClassVar[tuple[Conflicts, ...]] = (
        Conflicts("data", ("preference",), "it would learn rejected answers as it does chosen ones; use objective=dpo"),
    )
    Config = CausalLMConfig
    config: CausalLMConfig

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Target tokens."""
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Summed cross-entropy, a fp32 scalar."""
        labels_T = batch["labels"].flatten()
        c = self.config
        token_loss = TokenLoss(c.z_loss, c.label_smoothing) if model.training else TokenLoss()

        def readout(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            x_TD, tokens = x_BLD.flatten(0, 1), c.chunk_tokens or len(labels_T)
            if tokens < len(labels_T) or at_once(x_TD, head):
                loss = token_loss.chunked(x_TD, head, labels_T, tokens)
            else:
                loss = token_loss.of_logits(head(x_BLD).flatten(0, 1).float(), labels_T)
            if auxiliary is not None:
                loss = loss + auxiliary * (labels_T != IGNORED).sum()  # a mean per token, as the loss will be
            return loss

        loss: Tensor = model(batch["input_ids"], positions_BL=batch.get("positions"), segments_BL=batch.get("segments"), readout=readout)
        return loss
