"""Full training."""

from __future__ import annotations

from fw.kinds.model import CausalLM
from fw.kinds.peft import PeftPlugin


class Nothing(PeftPlugin):
    """All of the model trains."""

    api = 1

    def apply(self, model: CausalLM) -> None:
        """Nothing changes."""
