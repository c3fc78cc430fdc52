"""Next-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fw.kinds.data import IGNORED
from fw.kinds.model import Head
from fw.kinds.objective import ObjectivePlugin


@dataclass
class CausalLMConfig:
    """Next-token prediction has one choice."""

    z_loss: float = 0.0
    """Weight of log²Z per token, which keeps logits from drifting (PaLM, https://arxiv.org/abs/2204.02311); 0 for none. It enters
    the reported training loss, not the validation loss."""


class CausalLMObjective(ObjectivePlugin):
    """Cross-entropy of the next token, in fp32, averaged over the target tokens of the whole global batch."""

    api = 1
    Config = CausalLMConfig
    config: CausalLMConfig

    def count(self, batch: Mapping[str, Tensor]) -> int:
        """Target tokens."""
        return int((batch["labels"] != IGNORED).sum())

    def loss_sum(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Summed cross-entropy, a fp32 scalar."""
        labels_T = batch["labels"].flatten()
        z_loss = self.config.z_loss if model.training else 0.0

        def readout(x_BLD: Tensor, head: Head, auxiliary: Tensor | None) -> Tensor:
            logits_TV = head(x_BLD).flatten(0, 1).float()
            loss = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED, reduction="sum")
            if z_loss:
                # A product and no selection, which logits divided between ranks do not know.
                loss = loss + z_loss * (logits_TV.logsumexp(-1).square() * (labels_T != IGNORED)).sum()
            if auxiliary is not None:
                loss = loss + auxiliary * (labels_T != IGNORED).sum()  # a mean per token, as the loss will be
            return loss

        loss: Tensor = model(batch["input_ids"], positions_BL=batch.get("positions"), segments_BL=batch.get("segments"), readout=readout)
        return loss
