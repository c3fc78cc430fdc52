"""Full training."""

from __future__ import annotations

from fw.api import CausalLM, PeftPlugin


class Nothing(PeftPlugin):
    """All of the model trains."""

    api = 1

    def apply(self, model: CausalLM) -> None:
        """Nothing changes."""
